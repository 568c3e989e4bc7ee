"""Decoupled PPO: the policy that is stayed near (proximal) is not the one that sampled (behaviour)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forge_async.learner.corrections.ratios import bounded_exp, start_logprobs
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings

if TYPE_CHECKING:
    import torch


def decoupled(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Anchor = proximal policy, weight min(prox/mu, high).

    Batch size-invariance for policy optimization (Hilton et al. 2021); AReaL (Fu et al. 2025). The
    proximal policy is the one at the step's start: its log-probabilities are kept from the forward pass of the first
    update, in which it is the current policy.
    """
    return _around(start_logprobs(inputs), inputs, settings)


def decoupled_approx(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """As `decoupled`, with a proximal policy one update behind the current one, interpolated by age.

    log prox = log mu + a / (a + 1) * (log pi - log mu) with a the token's age in updates: the version before this one
    lies a of the a + 1 updates from the sampler to what this one makes (Li, Wu and Shen 2025, A-3PO; AReaL
    documentation, proximal approximation, log-linear). A token of the newest version has prox = mu.
    """
    age = inputs.ages.to(inputs.logprobs.dtype)
    way = age / (age + 1)
    proximal = inputs.behaviour_logprobs + way * (inputs.logprobs.detach() - inputs.behaviour_logprobs)
    return _around(proximal, inputs, settings)


def _around(proximal: torch.Tensor, inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    weights = bounded_exp((proximal - inputs.behaviour_logprobs) * inputs.mask).clamp(max=settings.high)
    return replace(inputs, anchor_logprobs=proximal, weights=weights)
