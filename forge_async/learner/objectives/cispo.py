"""CISPO."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, log_ratio, outside
from forge_async.learner.settings import ObjectiveSettings


def cispo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """Clipped importance-sampling policy optimization (MiniMax 2025, MiniMax-M1, eq. 4 and 5).

    -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi: the weight is clipped, and no token loses its gradient.
    """
    ratio = log_ratio(inputs).detach().exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return TokenLoss(loss=-weight * inputs.advantages * inputs.logprobs, clipped=outside(ratio, settings))
