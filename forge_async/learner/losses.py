"""Objectives, each a function of one micro-batch's log-probabilities that returns sums over its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from forge_async.learner.settings import ObjectiveSettings

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Sums over the tokens of a micro-batch; dividing is left to whoever knows the whole batch."""

    loss_sum: torch.Tensor
    """Scalar with gradient, summed over the tokens that are trained on."""
    clipped_tokens: torch.Tensor
    """Scalar, tokens whose ratio lies outside the clip range."""
    kl_sum: torch.Tensor
    """Scalar, sum of the k3 estimate of KL(sampler || current)."""
    logprob_diff_max: torch.Tensor
    """Scalar, largest |current - sampler| log-probability."""


LossFunction: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], LossTerms]"
"""(logprobs, behaviour_logprobs, advantages, mask), each [B, L] float32, to LossTerms."""


def objective_loss(settings: ObjectiveSettings, correction: str) -> LossFunction:
    """The loss that the settings name; `correction` is `async.correction`."""
    return partial(grpo_loss, clip_low=settings.clip_low, clip_high=settings.clip_high, corrected=correction != "none")


def cross_entropy_loss(
    logprobs: torch.Tensor, behaviour_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> LossTerms:
    """Supervised fine-tuning: -logprob of each token in the mask. The other arguments are not used."""
    zero = logprobs.new_zeros(())
    return LossTerms(loss_sum=-(logprobs * mask).sum(), clipped_tokens=zero, kl_sum=zero, logprob_diff_max=zero)


def grpo_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    corrected: bool = True,
) -> LossTerms:
    """Token-level policy-gradient loss, summed.

    With r = exp(logprobs - behaviour_logprobs) a token's loss is -min(r·A, clamp(r, 1 - clip_low, 1 + clip_high)·A):
    PPO's clipped surrogate (Schulman et al. 2017, eq. 7) with group-relative advantages (GRPO: Shao et al. 2024,
    DeepSeekMath, eq. 3) and an upper bound of its own (DAPO: Yu et al. 2025, "clip-higher"). The ratio is taken
    against the policy that sampled the token, so it corrects both for age and for differences between engine and
    learner.

    Args:
        logprobs: [B, L] float32 with gradient, the current policy's, of the sampled tokens.
        behaviour_logprobs: [B, L] float32, the sampler's.
        advantages: [B, L] float32.
        mask: [B, L] float32, 1 where the token is trained on.
        clip_low, clip_high: see the formula.
        corrected: False leaves ratio and clip out: -A·logprob, the uncorrected policy gradient.
    """
    log_ratio = (logprobs - behaviour_logprobs) * mask
    ratio = log_ratio.exp()
    if corrected:
        surrogate = (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    else:
        surrogate = logprobs * advantages
    difference = log_ratio.detach()
    outside = (ratio.detach() < 1 - clip_low) | (ratio.detach() > 1 + clip_high)
    return LossTerms(
        loss_sum=-(surrogate * mask).sum(),
        clipped_tokens=(outside * mask).sum(),
        kl_sum=((difference.exp() - 1 - difference) * mask).sum(),
        logprob_diff_max=difference.abs().max(),
    )
