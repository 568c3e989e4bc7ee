"""Where the samples of a batch are computed: on which rank, in which micro-batch, in which row. Indices only.

Ranks wait for each other in every micro-batch, so what counts is that those which run at the same time cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from forge_async.learner.packing import balanced_micro_batches, micro_batches, pack_rows, partition, sample_costs
from forge_async.learner.prefixes import Prefixes
from forge_async.learner.settings import ATTENTION_TOKENS

if TYPE_CHECKING:
    from forge_async.learner.settings import LearnerSettings

MicroBatch: TypeAlias = Sequence[Sequence[int]]
"""Of each row the indices of its samples, those of one family side by side; no row: nothing to compute."""
_Piece: TypeAlias = Sequence[int]
"""Samples that are laid side by side: one, or some that begin alike."""


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
    lengths: Sequence[int], layout: Layout, num_ranks: int = 1, prefixes: Prefixes | None = None
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
    if not lengths:
        return [[] for _ in range(num_ranks)]
    laying = _Laying(lengths, layout, prefixes or Prefixes.none(len(lengths)))
    lay = (
        [laying.shared] if not layout.packed else [laying.shared, laying.dealt] if num_ranks > 1 else [laying.by_width]
    )
    ways = [each(pieces, num_ranks) for pieces in laying.ways_to_cut() for each in lay]
    return ways[0] if len(ways) == 1 else min(ways, key=laying.step_cost)


def step_cost(
    ranks: Sequence[Sequence[MicroBatch]],
    lengths: Sequence[int],
    attention_tokens: int,
    prefixes: Prefixes | None = None,
) -> float:
    """Time of a step, in tokens of short samples: of each micro-batch that of the slowest rank, padding included."""
    layout = Layout(attention_tokens=attention_tokens)
    return _Laying(lengths, layout, prefixes or Prefixes.none(len(lengths))).step_cost(ranks)


class _Laying:
    """One batch of samples, and the ways to lay it out."""

    def __init__(self, lengths: Sequence[int], layout: Layout, prefixes: Prefixes) -> None:
        self._lengths, self._layout, self._prefixes = lengths, layout, prefixes
        self._costs = sample_costs(lengths, layout.attention_tokens)

    def ways_to_cut(self) -> list[list[_Piece]]:
        """Sample by sample; and where some may share their prompts, family by family before that."""
        alone: list[_Piece] = [[index] for index in range(len(self._lengths))]
        return [self._families(), alone] if self._layout.packed and self._prefixes.any_shared else [alone]

    def shared(self, pieces: Sequence[_Piece], num_ranks: int) -> list[list[MicroBatch]]:
        """Pieces to ranks by cost; then each rank lays out its own."""
        shares = partition([self._cost(piece) for piece in pieces], num_ranks)
        rows = [self._rows([pieces[place] for place in share]) for share in shares]
        count = max(len(self._cut(of_rank)) for of_rank in rows)
        return [self._micro_batches(of_rank, count) for of_rank in rows]

    def dealt(self, pieces: Sequence[_Piece], num_ranks: int) -> list[list[MicroBatch]]:
        """Micro-batches of all pieces, from the costliest on, to one rank after the other."""
        rows = self._rows(pieces)
        rounds = -(-len(self._cut(rows)) // num_ranks)
        batches = self._micro_batches(rows, rounds * num_ranks)
        return [batches[rank::num_ranks] for rank in range(num_ranks)]

    def by_width(self, pieces: Sequence[_Piece], num_ranks: int) -> list[list[MicroBatch]]:
        """For one rank: the widest rows in one micro-batch, the next in another."""
        assert num_ranks == 1, "micro-batches of several ranks must cost the same, not be of a width"
        rows = self._rows(pieces)
        widths = [self._width(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda number: -widths[number])
        cut = micro_batches([widths[number] for number in order], self._layout.micro_batch_tokens)
        return [[[rows[number] for number in sorted(order[place] for place in batch)] for batch in cut]]

    def step_cost(self, ranks: Sequence[Sequence[MicroBatch]]) -> float:
        """As the function of this name."""

        def cost(batch: MicroBatch) -> float:
            widths = [self._width(row) for row in batch]
            padding = len(widths) * max(widths, default=0) - sum(widths)
            return padding + sum(map(self._cost, batch))

        return sum(max(cost(batch) for batch in at_once) for at_once in zip(*ranks, strict=True))

    def _families(self) -> list[_Piece]:
        """The samples of each family, in as few pieces as fit into rows."""
        members: dict[int, list[int]] = {}
        for index, family in enumerate(self._prefixes.families):
            members.setdefault(family, []).append(index)
        pieces: list[_Piece] = []
        for family in members.values():
            prefix = self._prefixes.lengths[family[0]]
            own = [self._lengths[index] - prefix for index in family]
            room = max(self._layout.row_tokens - prefix, *own)
            pieces += [[family[place] for place in piece] for piece in pack_rows(own, room)]
        return pieces

    def _width(self, row: Sequence[int]) -> int:
        """Tokens of samples that lie side by side, each beginning that is shared counted once."""
        if len(row) == 1:
            return self._lengths[row[0]]
        return sum(self._lengths[index] for index in row) - sum(self._prefixes.skipped(row))

    def _cost(self, row: Sequence[int]) -> float:
        """The same in tokens of short samples."""
        if len(row) == 1:
            return self._costs[row[0]]
        whole = sum(self._costs[index] for index in row)
        return whole - sum(sample_costs(self._prefixes.skipped(row), self._layout.attention_tokens))

    def _rows(self, pieces: Sequence[_Piece]) -> list[list[int]]:
        if not self._layout.packed or not pieces:
            return [[*piece] for piece in pieces]
        widths = [self._width(piece) for piece in pieces]
        width = min(max(self._layout.row_tokens, *widths), sum(widths))
        rows = [[index for place in row for index in pieces[place]] for row in pack_rows(widths, width)]
        return [sorted(row, key=lambda index: (self._prefixes.families[index], index)) for row in rows]

    def _cut(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Rows of each micro-batch, in order."""
        return micro_batches([self._width(row) for row in rows], self._layout.micro_batch_tokens)

    def _micro_batches(self, rows: list[list[int]], count: int) -> list[MicroBatch]:
        """Rows spread over `count` micro-batches, the costliest first."""
        cut = self._cut(rows)
        if self._layout.packed:
            widths, costs = [self._width(row) for row in rows], [self._cost(row) for row in rows]
            cut = balanced_micro_batches(widths, costs, self._layout.micro_batch_tokens, count)
        cut += [[] for _ in range(count - len(cut))]
        return [[rows[number] for number in batch] for batch in cut]
