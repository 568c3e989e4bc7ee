"""The entropy bonus."""

from __future__ import annotations

from forge_async.core.errors import LearnerError
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.settings import ObjectiveSettings


def entropy_bonus(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """-H(pi) of each token over the whole vocabulary (Williams and Peng 1991; Schulman et al. 2017, eq. 9)."""
    if inputs.entropy is None:
        raise LearnerError("The entropy bonus needs the entropies of the tokens, and the learner gave none.")
    return TokenLoss(loss=-inputs.entropy)
