"""What an objective returns, and the clip that several share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import ObjectiveSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Of one micro-batch. What lies outside the mask is not looked at."""

    loss: torch.Tensor
    """[B, L] with gradient: each token's loss, before any mask, weight or denominator."""
    clipped: torch.Tensor | None = None
    """[B, L] bool: the ratio lies outside the clip range; None: the objective has none."""
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """[B, L] each: what else is to be recorded, as its mean over the loss tokens, under `objective/` and the name."""


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """[B, L] with gradient: log(current / anchor), 0 outside the mask."""
    return (inputs.logprobs - inputs.anchor_logprobs) * inputs.mask


def outside(ratio: torch.Tensor, settings: ObjectiveSettings) -> torch.Tensor:
    """[B, L] bool: is the ratio outside [1 - clip_low, 1 + clip_high]?"""
    ratio = ratio.detach()
    return (ratio < 1 - settings.clip_low) | (ratio > 1 + settings.clip_high)


def clipped_surrogate(ratio: torch.Tensor, inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """-min(r*A, clip(r, 1 - clip_low, 1 + clip_high)*A): PPO's surrogate (Schulman et al. 2017, eq. 7).

    With `dual_clip` = c > 0 the loss of a negative advantage is at most c*|A|: it would otherwise grow with r without
    bound (dual-clip PPO; Ye et al. 2020, "Mastering complex control in MOBA games").

    Args:
        ratio: [B, L] with gradient.
    """
    advantages = inputs.advantages
    clamped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    surrogate = (ratio * advantages).minimum(clamped * advantages)
    if settings.dual_clip > 0:
        surrogate = surrogate.maximum(settings.dual_clip * advantages).where(advantages < 0, surrogate)
    return TokenLoss(loss=-surrogate, clipped=outside(ratio, settings))
