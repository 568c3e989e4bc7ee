"""The importance ratios that corrections weigh or mask by, at the proximal policy and without gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forge_async.learner.inputs import LossInputs

if TYPE_CHECKING:
    import torch

LOG_LIMIT = 20.0
"""A log-ratio is limited to this before it is exponentiated, so that a long sample gives a large number, not inf."""


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: log(pi/mu) of each token, 0 outside the mask, without gradient."""
    return (inputs.logprobs.detach() - inputs.behaviour_logprobs) * inputs.mask


def bounded_exp(logarithm: torch.Tensor) -> torch.Tensor:
    """exp, with the argument limited to +-LOG_LIMIT."""
    return logarithm.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def weighted(inputs: LossInputs, weights: torch.Tensor) -> LossInputs:
    """Decoupled as in Hilton et al. 2021: the ratio starts at the current policy, the weights make up for the rest."""
    return replace(inputs, anchor_logprobs=inputs.logprobs.detach(), weights=weights)
