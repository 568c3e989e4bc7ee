"""Figures of a whole batch that every rank needs to compute its part."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Figures of the whole batch, all ranks and micro-batches: what sums are divided by, moments of the advantages."""

    num_loss_tokens: int
    """Tokens that are trained on."""
    num_samples: int
    """Samples with such a token."""
    num_batch_samples: int
    """Samples of the batch, those included that were left out because their advantages are 0."""
    num_samples_with_advantage: int
    """Samples of the batch with an advantage other than 0."""
    advantage_mean: float = 0.0
    """Mean over the tokens that are trained on."""
    advantage_std: float = 1.0
    """Standard deviation over the same."""
