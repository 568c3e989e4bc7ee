"""Supervised fine-tuning."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.settings import ObjectiveSettings


def cross_entropy(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """-log pi of each token: the maximum-likelihood loss. Advantages and the sampler's probabilities are not used."""
    return TokenLoss(loss=-inputs.logprobs)
