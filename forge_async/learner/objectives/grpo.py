"""GRPO."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def grpo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """PPO's surrogate of each token with group-relative advantages (Shao et al. 2024, DeepSeekMath, eq. 3).

    The defaults are today's practice rather than the paper's: the mean over all tokens of the batch and a wider clip
    above (both of DAPO). The paper's is `objective.denominator=sequence_means` with `clip_high=0.2`.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, settings)
