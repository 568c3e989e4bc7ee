"""The importance ratios that corrections weigh or mask by, at the proximal policy and without gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forge_async.learner.inputs import LossInputs

if TYPE_CHECKING:
    import torch

LOG_LIMIT = 20.0
"""A log-ratio is limited to this before it is exponentiated, so that a long sample gives a large number, not inf."""


def start_logprobs(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: the policy's log-probabilities at the step's start, without gradient: the proximal policy."""
    return inputs.logprobs.detach() if inputs.start_logprobs is None else inputs.start_logprobs


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: log(start/mu) of each token, 0 outside the mask, without gradient."""
    return (start_logprobs(inputs) - inputs.behaviour_logprobs) * inputs.mask


def bounded_exp(logarithm: torch.Tensor) -> torch.Tensor:
    """exp, with the argument limited to +-LOG_LIMIT."""
    return logarithm.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def weighted(inputs: LossInputs, weights: torch.Tensor) -> LossInputs:
    """Decoupled as in Hilton et al. 2021: the ratio starts at 1 with the step, the weights make up for the rest."""
    return replace(inputs, anchor_logprobs=start_logprobs(inputs), weights=weights)
