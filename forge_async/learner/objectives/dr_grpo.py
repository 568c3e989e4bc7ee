"""Dr. GRPO."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def dr_grpo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-like training", section 3.2).

    The surrogate is GRPO's. What differs is set with the name: advantages are not divided by the group's deviation
    (`advantage.scale=none`), and a sample's sum is divided by a constant length instead of its own
    (`objective.denominator=constant`), so that neither easy prompts nor short answers weigh more.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, settings)
