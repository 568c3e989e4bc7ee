"""AIPO: importance sampling that is clipped at one side."""

from __future__ import annotations

from dataclasses import replace

from forge_async.learner.corrections.ratios import bounded_exp
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def aipo(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight min(pi/mu, high) on the plain policy gradient (LlamaRL; Wu et al. 2025, AIPO, with high in 2..10).

    The ratio of the objective is pinned at 1, so that its clip never acts. In the first update of a batch this is
    `token_truncated` with a wider default; in later ones the weight moves with the current policy.
    """
    current = inputs.logprobs.detach()
    weights = bounded_exp((current - inputs.behaviour_logprobs) * inputs.mask).clamp(max=settings.high)
    return replace(inputs, anchor_logprobs=current, weights=weights)
