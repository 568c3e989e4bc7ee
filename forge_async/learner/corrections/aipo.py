"""AIPO: importance sampling that is clipped at one side."""

from __future__ import annotations

from forge_async.learner.corrections.token import token_truncated
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def aipo(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight min(pi/mu, high) on the plain policy gradient (LlamaRL; Wu et al. 2025, AIPO, with high in 2..10).

    With one update a batch this is `token_truncated` with a wider default: both pin the objective's ratio at 1, so that
    its clip never acts.
    """
    return token_truncated(inputs, settings)
