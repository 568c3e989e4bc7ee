"""Where the samples of a batch are computed: on which rank, in which micro-batch, in which row. Indices only.

Ranks wait for each other in every micro-batch, so what counts is that those which run at the same time cost the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from forge_async.learner.packing import balanced_micro_batches, micro_batches, pack_rows, partition, sample_costs
from forge_async.learner.settings import ATTENTION_TOKENS

if TYPE_CHECKING:
    from forge_async.learner.settings import LearnerSettings

MicroBatch: TypeAlias = Sequence[Sequence[int]]
"""Of each row the indices of its samples; no row: nothing to compute."""


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

    @classmethod
    def of(cls, learner: LearnerSettings) -> Layout:
        """What the settings ask for."""
        return cls(
            row_tokens=learner.row_tokens,
            micro_batch_tokens=learner.micro_batch_tokens,
            packed=learner.packed,
            attention_tokens=learner.attention_tokens,
            mini_batches=learner.mini_batches,
        )


def lay_out(lengths: Sequence[int], layout: Layout, num_ranks: int = 1) -> list[list[MicroBatch]]:
    """The micro-batches of each rank, as many on each, within the limits of `layout`.

    Either samples are shared among ranks by cost, and each rank packs its own, or rows and micro-batches are made of
    all samples and dealt out, the costliest at the same time. The first is finer where there are few rows, the second
    more even where some samples are much longer than others; the one whose step is shorter is taken.

    Args:
        lengths: tokens of each sample.
        layout: the limits.
        num_ranks: ranks that split the batch.
    """
    if not lengths:
        return [[] for _ in range(num_ranks)]
    shared = _shared_by_sample(lengths, layout, num_ranks)
    if num_ranks == 1 or not layout.packed:
        return shared
    dealt = _dealt_by_micro_batch(lengths, layout, num_ranks)
    return min(shared, dealt, key=lambda ranks: step_cost(ranks, lengths, layout.attention_tokens))


def step_cost(ranks: Sequence[Sequence[MicroBatch]], lengths: Sequence[int], attention_tokens: int) -> float:
    """Time of a step, in tokens of short samples: of each micro-batch that of the slowest rank, padding included."""
    costs = sample_costs(lengths, attention_tokens)

    def cost(batch: MicroBatch) -> float:
        widths = [sum(lengths[index] for index in row) for row in batch]
        padding = len(widths) * max(widths, default=0) - sum(widths)
        return padding + sum(costs[index] for row in batch for index in row)

    return sum(max(cost(batch) for batch in at_once) for at_once in zip(*ranks, strict=True))


def _shared_by_sample(lengths: Sequence[int], layout: Layout, num_ranks: int) -> list[list[MicroBatch]]:
    """Samples to ranks by cost; then each rank lays out its own."""
    costs = sample_costs(lengths, layout.attention_tokens)
    shares = partition(costs, num_ranks)
    rows = [_rows(lengths, share, layout) for share in shares]
    count = max(len(_cut(of_rank, lengths, layout)) for of_rank in rows)
    return [_micro_batches(of_rank, lengths, costs, layout, count) for of_rank in rows]


def _dealt_by_micro_batch(lengths: Sequence[int], layout: Layout, num_ranks: int) -> list[list[MicroBatch]]:
    """Micro-batches of all samples, from the costliest on, to one rank after the other."""
    costs = sample_costs(lengths, layout.attention_tokens)
    rows = _rows(lengths, range(len(lengths)), layout)
    rounds = -(-len(_cut(rows, lengths, layout)) // num_ranks)
    batches = _micro_batches(rows, lengths, costs, layout, rounds * num_ranks)
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def _rows(lengths: Sequence[int], chosen: Sequence[int], layout: Layout) -> list[list[int]]:
    if not layout.packed or not chosen:
        return [[index] for index in chosen]
    own = [lengths[index] for index in chosen]
    width = min(max(layout.row_tokens, max(own)), sum(own))
    return [[chosen[place] for place in row] for row in pack_rows(own, width)]


def _cut(rows: Sequence[Sequence[int]], lengths: Sequence[int], layout: Layout) -> list[list[int]]:
    """Rows of each micro-batch, in order."""
    return micro_batches([sum(lengths[index] for index in row) for row in rows], layout.micro_batch_tokens)


def _micro_batches(
    rows: list[list[int]], lengths: Sequence[int], costs: Sequence[float], layout: Layout, count: int
) -> list[MicroBatch]:
    """Rows spread over `count` micro-batches, the costliest first."""
    cut = _cut(rows, lengths, layout)
    if layout.packed:
        widths = [sum(lengths[index] for index in row) for row in rows]
        row_costs = [sum(costs[index] for index in row) for row in rows]
        cut = balanced_micro_batches(widths, row_costs, layout.micro_batch_tokens, count)
    cut += [[] for _ in range(count - len(cut))]
    return [[rows[number] for number in batch] for batch in cut]
