"""DAPO."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def dapo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """Decoupled clip and dynamic sampling (Yu et al. 2025, DAPO, eq. 8 and 10 to 12).

    The surrogate with a higher bound above (`clip_high=0.28`, "clip-higher"), averaged over all tokens of the batch.
    Set with the name as well: `advantage.zero_variance=refill` (dynamic sampling). Overlong shaping is
    `advantage.overlong_tokens`, which has no default of its own because it depends on the length limit.
    """
    return clipped_surrogate(log_ratio(inputs).exp(), inputs, settings)
