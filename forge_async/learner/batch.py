"""From groups to what a learner rank computes: its share of the samples, and the denominators that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Group, Samples
from forge_async.learner.counts import Counts
from forge_async.learner.layout import Layout, MicroBatch, lay_out
from forge_async.learner.prefixes import Prefixes, row_after_row, shared_prefixes
from forge_async.learner.rows import row_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """What one update of the weights is computed from."""

    counts: Counts
    """Of this part of the batch, all ranks: what the loss is divided by. The moments are the whole batch's."""
    batches: Sequence[MicroBatch]
    """This rank's micro-batches of it: places in the share's `samples`; as many on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One rank's part of a step's batch."""

    samples: Samples | None
    """None when this rank has nothing to compute; it still takes part in the step."""
    counts: Counts
    """Of the whole batch, all ranks."""
    mini_batches: tuple[MiniBatch, ...]
    """At least one; updates go through them in turn."""
    group_indices: tuple[int, ...]
    """Admission indices of the whole batch, ascending; named when the step fails."""
    origins: tuple[tuple[int, int], ...] = ()
    """Of each sample of `samples`: its group's admission index, and its number in the group."""
    skipped: np.ndarray | None = None
    """int32 [N], of each sample of `samples` the first tokens that another in its row is computed with; None: all are
    computed whole."""

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on, over all ranks."""
        return self.counts.num_loss_tokens


def split_batch(
    groups: Sequence[Group], num_ranks: int, *, keep_zero_advantage: bool, layout: Layout | None = None
) -> list[Share]:
    """Cut a batch into one share for each rank.

    Args:
        groups: of the batch, sorted by admission index.
        num_ranks: ranks that split the batch (the data-parallel degree).
        keep_zero_advantage: compute samples whose advantages are all zero too. They add nothing to the gradient; when
            they are left out, they leave the denominators as well, but for that of `constant`.
        layout: of rows, micro-batches and mini-batches, a group lying whole in one of the latter; as in the default
            settings when None.
    """
    samples = Samples.concat([group.samples for group in groups])
    origins = [(group.index, number) for group in groups for number in range(len(group.samples))]
    owners = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    indices = tuple(group.index for group in groups)
    return _shares(samples, keep_zero_advantage, owners, num_ranks, layout or Layout(), indices, origins)


def split_samples(samples: Samples, num_ranks: int, layout: Layout | None = None) -> list[Share]:
    """Cut samples into one share for each rank, even in cost."""
    return _shares(samples, True, np.arange(len(samples)), num_ranks, layout or Layout(), (), [])


def _shares(
    batch: Samples,
    keep_zero_advantage: bool,
    owners: np.ndarray,
    num_ranks: int,
    layout: Layout,
    groups: tuple[int, ...],
    origins: Sequence[tuple[int, int]],
) -> list[Share]:
    """`owners`: int [N], the group of each sample, which mini-batches do not divide."""
    tallies = _Tallies.of(batch)
    kept = np.ones(len(batch), bool) if keep_zero_advantage else tallies.with_advantage
    mean, std = _moments(batch.advantages[batch.loss_mask & np.repeat(kept, batch.lengths)])
    counts = tallies.counts(kept, np.ones(len(batch), bool), mean, std)
    parts, skipped = [], np.zeros(len(batch), np.int32)
    for part in _mini_batches(owners, kept, layout.mini_batches):
        own = np.flatnonzero(part & kept)
        laid, skipped[own] = lay_out_samples(batch.select(own), layout, num_ranks)
        parts.append(_Part(counts=tallies.counts(part & kept, part, mean, std), samples=own, laid=laid))
    return [_share(batch, rank, counts, parts, groups, origins, skipped) for rank in range(num_ranks)]


def lay_out_samples(samples: Samples, layout: Layout, num_ranks: int) -> tuple[list[list[MicroBatch]], np.ndarray]:
    """The micro-batches of each rank, and of each sample, int32 [N], the first tokens that its row holds already."""
    shares = layout.packed and layout.share_prompts
    prefixes = shared_prefixes(samples) if shares else Prefixes.none(len(samples))
    ranks = lay_out(row_lengths(samples), layout, num_ranks, prefixes)
    order, rows = row_after_row([row for of_rank in ranks for batch in of_rank for row in batch])
    skipped = np.zeros(len(samples), np.int32)
    skipped[order] = prefixes.skipped(order, rows)
    return ranks, skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A mini-batch, all ranks."""

    counts: Counts
    samples: np.ndarray
    """int64 [n], those of the batch that it computes."""
    laid: Sequence[Sequence[MicroBatch]]
    """Micro-batches of each rank: places in `samples`."""


def _share(
    batch: Samples,
    rank: int,
    counts: Counts,
    parts: Sequence[_Part],
    groups: tuple[int, ...],
    origins: Sequence[tuple[int, int]],
    skipped: np.ndarray,
) -> Share:
    laid = [row_after_row([row for each in part.laid[rank] for row in each])[0] for part in parts]
    mine = np.sort(np.concatenate([part.samples[places] for part, places in zip(parts, laid, strict=True)]))
    mini_batches = []
    for part in parts:
        places = np.searchsorted(mine, part.samples).tolist()
        own = [[[places[index] for index in row] for row in each] for each in part.laid[rank]]
        mini_batches.append(MiniBatch(counts=part.counts, batches=own))
    return Share(
        samples=batch.select(mine) if len(mine) else None,
        counts=counts,
        mini_batches=tuple(mini_batches),
        group_indices=groups,
        origins=tuple([origins[index] for index in mine.tolist()]) if origins else (),
        skipped=skipped[mine] if skipped[mine].any() else None,
    )


def _mini_batches(owners: np.ndarray, kept: np.ndarray, count: int) -> list[np.ndarray]:
    """bool [N], the samples of each mini-batch: groups are dealt out in turn, those that are computed first."""
    if count == 1:
        return [np.ones(len(owners), bool)]
    groups, group_of = np.unique(owners, return_inverse=True)
    computed = np.isin(groups, owners[kept])
    number = np.empty(len(groups), np.int64)
    number[np.argsort(~computed, kind="stable")] = np.arange(len(groups)) % count
    return [number[group_of] == part for part in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tallies:
    """What is counted of each sample of a batch."""

    trained: np.ndarray
    """int64 [N], tokens that are trained on."""
    with_advantage: np.ndarray
    """bool [N], whether a token has an advantage other than 0."""

    @classmethod
    def of(cls, batch: Samples) -> _Tallies:
        edges = batch.bounds()

        def in_each(flags: np.ndarray) -> np.ndarray:
            return np.diff(np.concatenate([[0], np.cumsum(flags)])[edges])

        # "!= 0" rather than "> 0": an advantage that is not a number must reach the learner, which refuses it by name.
        return cls(trained=in_each(batch.loss_mask), with_advantage=in_each(batch.advantages != 0) > 0)

    def counts(self, kept: np.ndarray, whole: np.ndarray, mean: float, std: float) -> Counts:
        """Of the samples `kept` among those of `whole`, bool [N] each; with the moments of the advantages."""
        return Counts(
            num_loss_tokens=int(self.trained[kept].sum()),
            num_samples=int(np.count_nonzero(self.trained[kept])),
            num_batch_samples=int(np.count_nonzero(whole)),
            num_samples_with_advantage=int(np.count_nonzero(self.with_advantage & whole)),
            advantage_mean=mean,
            advantage_std=std,
        )


def _moments(advantages: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation, in float64; what is not finite stays so, for the learner to refuse."""
    with np.errstate(invalid="ignore"):
        wide = advantages.astype(np.float64)
        return (float(wide.mean()), float(wide.std())) if len(wide) else (0.0, 1.0)
