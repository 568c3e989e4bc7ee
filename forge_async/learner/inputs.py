"""What objectives and corrections are given: a micro-batch of packed rows as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """A micro-batch. Entry [b, l] speaks of one sampled token; a row may hold several samples, none spans two rows.

    What an objective needs beyond the log-probabilities is None unless the settings ask for it.
    """

    logprobs: torch.Tensor
    """[B, L] float32 with gradient: the current policy's log-probability of the token. These, and all that follow, are
    over the tokens that the sampler chose among."""
    behaviour_logprobs: torch.Tensor
    """[B, L] float32: the sampler's, after temperature."""
    anchor_logprobs: torch.Tensor
    """[B, L] float32: those that the ratio is taken against; which they are is the correction's choice."""
    start_logprobs: torch.Tensor | None = None
    """[B, L] float32: the policy's at the step's start; None in the first update, where that is the current one."""
    weights: torch.Tensor | None = None
    """[B, L] float32 without gradient: the correction's weight of each token's loss; None: 1 everywhere."""
    advantages: torch.Tensor
    """[B, L] float32, 0 outside the mask."""
    mask: torch.Tensor
    """[B, L] float32, 1 where the token is trained on."""
    segments: torch.Tensor
    """[B, L] int64: number of the sample inside the micro-batch; the padding is one of its own, without a token."""
    num_segments: int
    """Samples of the micro-batch, padding included."""
    ages: torch.Tensor
    """[B, L] int64: updates between the token's version and the one that is trained; 0 outside the mask."""
    reference_logprobs: torch.Tensor | None = None
    """[B, L] float32: the reference model's."""
    teacher_logprobs: torch.Tensor | None = None
    """[B, L] float32: the teacher's."""
    entropy: torch.Tensor | None = None
    """[B, L] float32: entropy of the current policy's distribution, in nats; with gradient where it is part of the
    loss."""
    values: torch.Tensor | None = None
    """[B, L] float32 with gradient: the value head's prediction before the token."""
    old_values: torch.Tensor | None = None
    """[B, L] float32: the same before the step."""
    returns: torch.Tensor | None = None
    """[B, L] float32: what the value head is to predict."""
