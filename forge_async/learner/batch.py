"""From groups to what a learner rank computes: its share of the samples, and the denominators that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Group, Samples
from forge_async.learner.counts import Counts
from forge_async.learner.packing import partition, sample_costs
from forge_async.learner.settings import ATTENTION_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a step's batch."""

    samples: Samples | None
    """None when this rank has nothing to compute; it still takes part in the step."""
    counts: Counts
    """Of the whole batch, all ranks: what the loss is divided by."""
    group_indices: tuple[int, ...]
    """Admission indices of the whole batch, ascending; named when the step fails."""
    origins: tuple[tuple[int, int], ...] = ()
    """Of each sample of `samples`: its group's admission index, and its number in the group."""

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on, over all ranks."""
        return self.counts.num_loss_tokens


def split_batch(
    groups: Sequence[Group], num_ranks: int, *, keep_zero_advantage: bool, attention_tokens: int = ATTENTION_TOKENS
) -> list[Share]:
    """Cut a batch into one share for each rank.

    Args:
        groups: of the batch, sorted by admission index.
        num_ranks: ranks that split the batch (the data-parallel degree).
        keep_zero_advantage: compute samples whose advantages are all zero too. They add nothing to the gradient; when
            they are left out, they leave the denominators as well, but for that of `constant`.
        attention_tokens: length of a sample at which attention costs as much as the rest; shares are even in cost.
    """
    samples = Samples.concat([group.samples for group in groups])
    origins = [(group.index, number) for group in groups for number in range(len(group.samples))]
    kept = list(range(len(samples))) if keep_zero_advantage else _rows_with_gradient(samples)
    return _shares(samples, kept, num_ranks, attention_tokens, tuple(group.index for group in groups), origins)


def split_samples(samples: Samples, num_ranks: int, attention_tokens: int = ATTENTION_TOKENS) -> list[Share]:
    """Cut samples into one share for each rank, even in cost."""
    return _shares(samples, list(range(len(samples))), num_ranks, attention_tokens, (), [])


def _shares(
    batch: Samples,
    kept: list[int],
    num_ranks: int,
    attention_tokens: int,
    groups: tuple[int, ...],
    origins: Sequence[tuple[int, int]],
) -> list[Share]:
    samples = batch if len(kept) == len(batch) else batch.select(kept)
    mean, std = _moments(samples.advantages[samples.loss_mask])
    counts = Counts(
        num_loss_tokens=samples.num_loss_tokens,
        num_samples=_num_with_loss(samples),
        num_batch_samples=len(batch),
        num_samples_with_advantage=len(_rows_with_gradient(batch)),
        advantage_mean=mean,
        advantage_std=std,
    )
    return [
        Share(
            samples=samples.select(share) if share else None,
            counts=counts,
            group_indices=groups,
            origins=tuple(origins[kept[row]] for row in share) if origins else (),
        )
        for share in partition(sample_costs(samples.lengths.tolist(), attention_tokens), num_ranks)
    ]


def _moments(advantages: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation, in float64; what is not finite stays so, for the learner to refuse."""
    with np.errstate(invalid="ignore"):
        wide = advantages.astype(np.float64)
        return (float(wide.mean()), float(wide.std())) if len(wide) else (0.0, 1.0)


def _num_with_loss(samples: Samples) -> int:
    edges = samples.bounds()[:-1]
    return int(np.logical_or.reduceat(samples.loss_mask, edges).sum()) if len(samples) else 0


def _rows_with_gradient(samples: Samples) -> list[int]:
    edges = samples.bounds()[:-1]
    # "!= 0" rather than "> 0": an advantage that is not a number must reach the learner, which refuses it by name.
    return np.flatnonzero(np.logical_or.reduceat(samples.advantages != 0, edges)).tolist() if len(samples) else []
