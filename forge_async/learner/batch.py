"""From groups to what a learner rank computes: its share of the samples, and the denominators that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forge_async.core.records import Group, Samples
from forge_async.learner.counts import Counts
from forge_async.learner.layout import Layout, MicroBatch, lay_out
from forge_async.learner.prefixes import Prefixes, shared_prefixes
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
    kept = list(range(len(samples))) if keep_zero_advantage else _rows_with_gradient(samples)
    owners = np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups])
    indices = tuple(group.index for group in groups)
    return _shares(samples, kept, owners, num_ranks, layout or Layout(), indices, origins)


def split_samples(samples: Samples, num_ranks: int, layout: Layout | None = None) -> list[Share]:
    """Cut samples into one share for each rank, even in cost."""
    rows = list(range(len(samples)))
    return _shares(samples, rows, np.arange(len(samples)), num_ranks, layout or Layout(), (), [])


def _shares(
    batch: Samples,
    kept: list[int],
    owners: np.ndarray,
    num_ranks: int,
    layout: Layout,
    groups: tuple[int, ...],
    origins: Sequence[tuple[int, int]],
) -> list[Share]:
    """`owners`: int [N], the group of each sample, which mini-batches do not divide."""
    counts = _counts(batch, kept, list(range(len(batch))))
    computed, parts, skipped = set(kept), [], np.zeros(len(batch), np.int32)
    for part in _mini_batches(owners, kept, layout.mini_batches):
        own = [row for row in part if row in computed]
        laid, skipped[own] = lay_out_samples(batch.select(own), layout, num_ranks)
        moments = {"advantage_mean": counts.advantage_mean, "advantage_std": counts.advantage_std}
        of_ranks = [[[[own[place] for place in row] for row in batch] for batch in of_rank] for of_rank in laid]
        parts.append((replace(_counts(batch, own, part), **moments), of_ranks))
    return [_share(batch, rank, counts, parts, groups, origins, skipped) for rank in range(num_ranks)]


def lay_out_samples(samples: Samples, layout: Layout, num_ranks: int) -> tuple[list[list[MicroBatch]], np.ndarray]:
    """The micro-batches of each rank, and of each sample, int32 [N], the first tokens that its row holds already."""
    shares = layout.packed and layout.share_prompts
    prefixes = shared_prefixes(samples) if shares else Prefixes.none(len(samples))
    ranks = lay_out(row_lengths(samples).tolist(), layout, num_ranks, prefixes)
    skipped = np.zeros(len(samples), np.int32)
    for row in (row for of_rank in ranks for batch in of_rank for row in batch):
        skipped[list(row)] = prefixes.skipped(row)
    return ranks, skipped


def _share(
    batch: Samples,
    rank: int,
    counts: Counts,
    parts: Sequence[tuple[Counts, Sequence[Sequence[MicroBatch]]]],
    groups: tuple[int, ...],
    origins: Sequence[tuple[int, int]],
    skipped: np.ndarray,
) -> Share:
    mine = sorted(index for _, of_ranks in parts for each in of_ranks[rank] for row in each for index in row)
    places = {index: place for place, index in enumerate(mine)}
    return Share(
        samples=batch.select(mine) if mine else None,
        counts=counts,
        mini_batches=tuple(
            MiniBatch(
                counts=own,
                batches=[[[places[index] for index in row] for row in each] for each in of_ranks[rank]],
            )
            for own, of_ranks in parts
        ),
        group_indices=groups,
        origins=tuple(origins[index] for index in mine) if origins else (),
        skipped=skipped[mine] if skipped[mine].any() else None,
    )


def _mini_batches(owners: np.ndarray, kept: Sequence[int], count: int) -> list[list[int]]:
    """Samples of each mini-batch: groups are dealt out in turn, those that are computed before the others."""
    computed = set(owners[kept].tolist())
    order = sorted(set(owners.tolist()), key=lambda owner: (owner not in computed, owner))
    of_owner = {owner: number % count for number, owner in enumerate(order)}
    found: list[list[int]] = [[] for _ in range(count)]
    for row, owner in enumerate(owners.tolist()):
        found[of_owner[owner]].append(row)
    return found


def _counts(batch: Samples, kept: list[int], whole: list[int]) -> Counts:
    """Of the samples `kept` among those of `whole`."""
    samples, everything = batch.select(kept), batch.select(whole)
    mean, std = _moments(samples.advantages[samples.loss_mask])
    return Counts(
        num_loss_tokens=samples.num_loss_tokens,
        num_samples=_num_with_loss(samples),
        num_batch_samples=len(everything),
        num_samples_with_advantage=len(_rows_with_gradient(everything)),
        advantage_mean=mean,
        advantage_std=std,
    )


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
