"""Where the samples of a batch are computed: on which rank, in which micro-batch, in which row. Indices only.

Ranks wait for each other in every micro-batch, so what counts is that those which run at the same time cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from forge_async.core.records import bounds
from forge_async.learner.packing import balanced_micro_batches, micro_batches, pack_rows, partition, sample_costs
from forge_async.learner.prefixes import Prefixes, row_after_row
from forge_async.learner.settings import ATTENTION_TOKENS

if TYPE_CHECKING:
    from forge_async.learner.settings import LearnerSettings

MicroBatch: TypeAlias = Sequence[Sequence[int]]
"""Of each row the indices of its samples, those of one family side by side; no row: nothing to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How samples are laid out; the fields are the settings of `learner` with the same names."""

    row_tokens: int = 64
    """Tokens of a packed row; it grows to the longest sample."""
    micro_batch_tokens: int = 2048
    """Most tokens of a micro-batch, padding included."""
    packed: bool = True
    """Whether samples share rows; without it each has a row, padded to the longest of its micro-batch."""
    attention_tokens: int = ATTENTION_TOKENS
    """Length of a sample at which attention costs as much as the rest."""
    mini_batches: int = 1
    """Parts that a batch is cut into, each for updates of its own."""
    share_prompts: bool = True
    """Whether samples of a row that begin with the same prompt share it; packed rows only."""

    @classmethod
    def of(cls, learner: LearnerSettings) -> Layout:
        """What the settings ask for."""
        return cls(
            row_tokens=learner.row_tokens,
            micro_batch_tokens=learner.micro_batch_tokens,
            packed=learner.packed,
            attention_tokens=learner.attention_tokens,
            mini_batches=learner.mini_batches,
            share_prompts=learner.share_prompts,
        )


def lay_out(
    lengths: Sequence[int] | np.ndarray, layout: Layout, num_ranks: int = 1, prefixes: Prefixes | None = None
) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, as many on each, within the limits of `layout`.

    Pieces are laid out, which are single samples, or all of a family as far as they fit into a row. Either pieces are
    shared among ranks by cost, and each rank packs its own, or rows and micro-batches are made of all of them and dealt
    out, the costliest at the same time. The first is finer where there are few rows, the second more even where some
    samples are much longer than others. A single rank waits for nobody: its rows of like width share a micro-batch,
    which saves padding. Of these ways the one whose step is the shortest is taken.

    Args:
        lengths: tokens of each sample.
        layout: the limits.
        num_ranks: ranks that split the batch.
        prefixes: which samples begin alike; None: nothing is shared.
    """
    if not len(lengths):
        return [[] for _ in range(num_ranks)]
    laying = _Laying(lengths, layout, prefixes or Prefixes.none(len(lengths)))
    lay = (
        [laying.shared] if not layout.packed else [laying.shared, laying.dealt] if num_ranks > 1 else [laying.by_width]
    )
    ways = [each(pieces, num_ranks) for pieces in laying.ways_to_cut() for each in lay]
    rows_of_ranks = ways[0] if len(ways) == 1 else min(ways, key=_step_cost)
    return [_micro_batches_of(rows, batches) for rows, batches in rows_of_ranks]


def step_cost(
    ranks: Sequence[Sequence[MicroBatch]],
    lengths: Sequence[int],
    attention_tokens: int,
    prefixes: Prefixes | None = None,
) -> float:
    """Time of a step, in tokens of short samples: of each micro-batch that of the slowest rank, padding included."""
    laying = _Laying(lengths, Layout(attention_tokens=attention_tokens), prefixes or Prefixes.none(len(lengths)))
    way: _Way = []
    for of_rank in ranks:
        order, rows = row_after_row([row for batch in of_rank for row in batch])
        numbers = iter(range(len(lengths)))
        way.append((laying.measured(order, np.bincount(rows)), [[next(numbers) for _ in batch] for batch in of_rank]))
    return _step_cost(way)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """Samples that lie side by side: pieces, which are one sample or some that begin alike; or rows of pieces."""

    order: np.ndarray
    """int64 [N], the samples, line after line."""
    sizes: np.ndarray
    """int64 [L], samples of each line."""
    widths: list[int]
    """Tokens of each line, a beginning that is shared counted once."""
    costs: list[float]
    """The same in tokens of short samples."""


_Way: TypeAlias = list[tuple[_Lines, list[list[int]]]]
"""A layout: of each rank its rows, and of each of its micro-batches the numbers of the rows in it."""


def _micro_batches_of(rows: _Lines, batches: Sequence[Sequence[int]]) -> list[MicroBatch]:
    samples, edges = rows.order.tolist(), bounds(rows.sizes).tolist()
    lists = [samples[start:stop] for start, stop in pairwise(edges)]
    return [[lists[number] for number in batch] for batch in batches]


def _step_cost(way: _Way) -> float:
    """As `step_cost`."""

    def cost(rows: _Lines, batch: Sequence[int]) -> float:
        widths = [rows.widths[number] for number in batch]
        padding = len(widths) * max(widths, default=0) - sum(widths)
        return padding + sum([rows.costs[number] for number in batch])

    of_ranks = [[cost(rows, batch) for batch in batches] for rows, batches in way]
    return sum(map(max, zip(*of_ranks, strict=True)))


class _Laying:
    """One batch of samples, and the ways to lay it out."""

    def __init__(self, lengths: Sequence[int] | np.ndarray, layout: Layout, prefixes: Prefixes) -> None:
        self._lengths, self._layout, self._prefixes = np.asarray(lengths, np.int64), layout, prefixes
        self._costs = sample_costs(self._lengths, layout.attention_tokens)
        self._prefix_costs = sample_costs(prefixes.lengths, layout.attention_tokens)
        self._by_family = np.argsort(prefixes.families, kind="stable")
        """The samples, those of a family side by side."""
        self._place = np.empty_like(self._by_family)
        """Of each sample its place there."""
        self._place[self._by_family] = np.arange(len(self._lengths))

    def ways_to_cut(self) -> list[_Lines]:
        """Sample by sample; and where some may share their prompts, family by family before that."""
        alone = _Lines(
            order=np.arange(len(self._lengths)),
            sizes=np.ones_like(self._lengths),
            widths=self._lengths.tolist(),
            costs=self._costs.tolist(),
        )
        return [self._families(), alone] if self._layout.packed and self._prefixes.any_shared else [alone]

    def shared(self, pieces: _Lines, num_ranks: int) -> _Way:
        """Pieces to ranks by cost; then each rank lays out its own."""
        rows = [self._rows(pieces, share) for share in partition(pieces.costs, num_ranks)]
        count = max(len(self._cut(of_rank)) for of_rank in rows)
        return [(of_rank, self._micro_batches(of_rank, count)) for of_rank in rows]

    def dealt(self, pieces: _Lines, num_ranks: int) -> _Way:
        """Micro-batches of all pieces, from the costliest on, to one rank after the other."""
        rows = self._rows(pieces)
        rounds = -(-len(self._cut(rows)) // num_ranks)
        batches = self._micro_batches(rows, rounds * num_ranks)
        return [(rows, batches[rank::num_ranks]) for rank in range(num_ranks)]

    def by_width(self, pieces: _Lines, num_ranks: int) -> _Way:
        """For one rank: the widest rows in one micro-batch, the next in another."""
        assert num_ranks == 1, "micro-batches of several ranks must cost the same, not be of a width"
        rows = self._rows(pieces)
        order = sorted(range(len(rows.widths)), key=rows.widths.__getitem__, reverse=True)
        cut = micro_batches([rows.widths[number] for number in order], self._layout.micro_batch_tokens)
        return [(rows, [sorted([order[place] for place in batch]) for batch in cut])]

    def measured(self, order: np.ndarray, sizes: np.ndarray) -> _Lines:
        """Lines of so many samples, int64 [L], in the order in which they are to lie, int64 [N]."""
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        skipped = self._prefixes.skipped(order, numbers)

        def sums(values: np.ndarray) -> np.ndarray:
            return np.bincount(numbers, values, minlength=len(sizes))

        return _Lines(
            order=order,
            sizes=sizes,
            widths=sums(self._lengths[order] - skipped).astype(np.int64).tolist(),
            costs=(sums(self._costs[order]) - sums(self._prefix_costs[order] * (skipped > 0))).tolist(),
        )

    def _families(self) -> _Lines:
        """The samples of each family, in as few pieces as fit into rows."""
        families, lengths = self._prefixes.families[self._by_family], self._prefixes.lengths[self._by_family]
        own = self._lengths[self._by_family] - lengths
        firsts = np.flatnonzero(np.diff(families, prepend=-1))
        rooms = np.maximum(self._layout.row_tokens - lengths[firsts], np.maximum.reduceat(own, firsts))
        sizes, order = np.diff(firsts, append=len(families)), self._by_family
        if (too_wide := np.add.reduceat(own, firsts) > rooms).any():
            pieces: list[np.ndarray] = []
            for first, size, room, cut in zip(firsts.tolist(), sizes.tolist(), rooms.tolist(), too_wide, strict=True):
                members = order[first : first + size]
                packed = pack_rows(own[first : first + size].tolist(), room) if cut else [range(size)]
                pieces += [members[piece] for piece in packed]
            order, sizes = np.concatenate(pieces), np.array([len(piece) for piece in pieces])
        return self.measured(order, sizes)

    def _rows(self, pieces: _Lines, chosen: Sequence[int] | None = None) -> _Lines:
        """The rows of some pieces, of all by default; in a row the samples of a family lie side by side."""
        if chosen is not None:
            pieces = _some(pieces, np.array(chosen, dtype=np.int64))
        if not self._layout.packed or not pieces.widths:
            return pieces
        places, rows = row_after_row(pack_rows(pieces.widths, max(self._layout.row_tokens, *pieces.widths)))
        numbers = np.empty_like(rows)
        numbers[places] = rows
        # By row, then by place among the families: one key for both.
        key = np.repeat(numbers, pieces.sizes) * len(self._lengths) + self._place[pieces.order]
        key.sort()
        rows, places = np.divmod(key, len(self._lengths))
        return self.measured(self._by_family[places], np.bincount(rows))

    def _cut(self, rows: _Lines) -> list[list[int]]:
        """Rows of each micro-batch, in order."""
        return micro_batches(rows.widths, self._layout.micro_batch_tokens)

    def _micro_batches(self, rows: _Lines, count: int) -> list[list[int]]:
        """Rows spread over `count` micro-batches, the costliest first."""
        if self._layout.packed:
            return balanced_micro_batches(rows.widths, rows.costs, self._layout.micro_batch_tokens, count)
        cut = self._cut(rows)
        return cut + [[] for _ in range(count - len(cut))]


def _some(lines: _Lines, chosen: np.ndarray) -> _Lines:
    """Those lines that are chosen, int64 [n], in that order."""
    sizes = lines.sizes[chosen]
    # Sample i of the result lies as far behind its line's first as it does in `lines`.
    ahead = bounds(lines.sizes)[chosen] - bounds(sizes)[:-1]
    return _Lines(
        order=lines.order[np.repeat(ahead, sizes) + np.arange(sizes.sum())],
        sizes=sizes,
        widths=[lines.widths[number] for number in chosen.tolist()],
        costs=[lines.costs[number] for number in chosen.tolist()],
    )
