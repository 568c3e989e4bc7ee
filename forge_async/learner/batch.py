"""From groups to what a learner rank computes: its share of the samples, and the denominator that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Group, Samples
from forge_async.learner.packing import partition


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a step's batch."""

    samples: Samples | None
    """None when this rank has nothing to compute; it still takes part in the step."""
    num_loss_tokens: int
    """Tokens that are trained on, over all ranks: the denominator of the loss."""
    group_indices: tuple[int, ...]
    """Admission indices of the whole batch, ascending; named when the step fails."""


def split_batch(groups: Sequence[Group], num_ranks: int, *, keep_zero_advantage: bool) -> list[Share]:
    """Cut a batch into one share for each rank.

    Args:
        groups: of the batch, sorted by admission index.
        num_ranks: ranks that split the batch (the data-parallel degree).
        keep_zero_advantage: compute samples whose advantages are all zero too. They add nothing to the gradient; when
            they are left out, they leave the denominator as well.
    """
    samples = Samples.concat([group.samples for group in groups])
    if not keep_zero_advantage:
        samples = samples.select(_rows_with_gradient(samples))
    return split_samples(samples, num_ranks, tuple(group.index for group in groups))


def split_samples(samples: Samples, num_ranks: int, group_indices: tuple[int, ...] = ()) -> list[Share]:
    """Cut samples into one share for each rank, even in tokens."""
    return [
        Share(
            samples=samples.select(share) if share else None,
            num_loss_tokens=samples.num_loss_tokens,
            group_indices=group_indices,
        )
        for share in partition(samples.lengths.tolist(), num_ranks)
    ]


def _rows_with_gradient(samples: Samples) -> list[int]:
    edges = samples.bounds()[:-1]
    # "!= 0" rather than "> 0": an advantage that is not a number must reach the learner, which refuses it by name.
    return np.flatnonzero(np.logical_or.reduceat(samples.advantages != 0, edges)).tolist() if len(samples) else []
