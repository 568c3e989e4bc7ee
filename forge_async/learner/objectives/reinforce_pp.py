"""REINFORCE++."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def reinforce_pp(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """REINFORCE++ (Hu et al. 2025, "Stabilizing critic-free policy optimization with global advantage normalization").

    PPO's surrogate without a critic. Set with the name: no baseline of the group (`advantage.baseline=none`) and
    advantages normalised over the tokens of the whole batch (`objective.normalise_advantages=true`). The penalty of the
    divergence from a reference belongs into the reward: `objective.kl_weight` with `objective.kl_place=reward`. The
    variant with a group's baseline is `advantage.baseline=group_mean`.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, settings)
