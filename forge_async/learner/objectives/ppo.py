"""PPO with a value head."""

from __future__ import annotations

from forge_async.core.errors import LearnerError
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def ppo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """PPO's surrogate with the advantages that the value head gives (Schulman et al. 2017, eq. 7; GAE: 2016, eq. 16).

    The learner replaces the advantages by those of `learner.gae` before the step; set with the name are
    `advantage.baseline=none` and `advantage.scale=none`, so that what comes in is the reward.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, settings)


def value_loss(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """max((V - R)^2, (V_old + clip(V - V_old, value_clip) - R)^2) / 2 for each token.

    Squared error of the value before the token, clipped around its prediction before the step (Schulman et al. 2017,
    eq. 9, with the clip of OpenAI's baselines); value_clip = 0 leaves the clip out.
    """
    values, old, returns = inputs.values, inputs.old_values, inputs.returns
    if values is None or old is None or returns is None:
        raise LearnerError("The value loss needs values and returns, and the learner gave none.")
    error = (values - returns).square()
    if settings.value_clip > 0:
        near = old + (values - old).clamp(-settings.value_clip, settings.value_clip)
        error = error.maximum((near - returns).square())
    return TokenLoss(loss=error / 2)
