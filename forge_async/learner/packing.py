"""Which samples share a row, which rows share a micro-batch, which rank computes what. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import groupby

import numpy as np


def sample_costs(lengths: np.ndarray, attention_tokens: int) -> np.ndarray:
    """float64 [N], what each sample of int64 [N] tokens costs, in tokens of short samples: L + L^2 / attention_tokens.

    The part that is linear in the length is that of the projections, the quadratic one is attention's; both are equal
    at a length of `attention_tokens`.
    """
    return lengths + lengths * lengths / attention_tokens


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """First-fit decreasing: put samples into as few rows of `row_tokens` tokens as this simple rule finds.

    A sample longer than a row gets a row of its own. Rows, and samples inside a row, keep ascending order of their
    first member, so that equal inputs always give the same batches.

    Args:
        lengths: tokens of each sample, at least 1.
        row_tokens: tokens of a row.

    Returns indices of the samples of each row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    longest_first = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    shortest = min(lengths, default=1)
    not_full: list[int] = []
    for length, same in groupby(longest_first, key=lengths.__getitem__):
        samples, placed = list(same), 0
        for row in not_full:
            if placed == len(samples):
                break
            if (room := free[row] // length) > 0:
                more = samples[placed : placed + room]
                rows[row] += more
                free[row] -= length * len(more)
                placed += len(more)
        while placed < len(samples):
            more = samples[placed : placed + max(row_tokens // length, 1)]
            not_full.append(len(rows))
            rows.append(more)
            free.append(row_tokens - length * len(more))
            placed += len(more)
        not_full = [row for row in not_full if free[row] >= shortest]
    for row in rows:
        row.sort()
    rows.sort()
    return rows


def micro_batches(row_widths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Cut rows, in order, into micro-batches of at most `micro_batch_tokens` tokens counted as rows × widest row.

    A row wider than the limit gets a micro-batch of its own. Returns indices of the rows of each micro-batch.
    """
    batches: list[list[int]] = []
    widest = 0
    for index, width in enumerate(row_widths):
        if batches and (len(batches[-1]) + 1) * max(widest, width) <= micro_batch_tokens:
            batches[-1].append(index)
            widest = max(widest, width)
        else:
            batches.append([index])
            widest = width
    return batches


def balanced_micro_batches(
    row_widths: Sequence[int], row_costs: Sequence[float], micro_batch_tokens: int, count: int
) -> list[list[int]]:
    """Spread rows over `count` micro-batches so that their costs are even, the costliest micro-batch first.

    Ranks wait for each other in every micro-batch; when each of them has as many and begins with the costliest, those
    that run at the same time cost about the same. The limit is that of `micro_batches`; where rows cannot be spread
    within it, they are cut as there, which takes at most `count`.

    Args:
        row_widths: tokens of each row.
        row_costs: what each row costs, in any unit.
        micro_batch_tokens: the limit, counted as rows × widest row.
        count: micro-batches to make, at least as many as `micro_batches` makes.

    Returns indices of the rows of each micro-batch; some may be empty.
    """
    batches: list[list[int]] = [[] for _ in range(count)]
    widest = [0] * count
    least_load = [(0.0, at) for at in range(count)]
    """A heap of the micro-batches that may still take a row."""
    for row in sorted(range(len(row_widths)), key=row_costs.__getitem__, reverse=True):
        width, too_full = row_widths[row], []
        while least_load and _exceeds(micro_batch_tokens, batches[at := least_load[0][1]], max(widest[at], width)):
            if not _exceeds(micro_batch_tokens, batches[at], widest[at]):  # a narrower row may fit
                too_full.append(least_load[0])
            heapq.heappop(least_load)
        if not least_load:
            batches = micro_batches(row_widths, micro_batch_tokens)
            batches += [[] for _ in range(count - len(batches))]
            break
        load, place = least_load[0]
        batches[place].append(row)
        widest[place] = max(widest[place], width)
        heapq.heapreplace(least_load, (load + row_costs[row], place))
        for each in too_full:
            heapq.heappush(least_load, each)
    return sorted(map(sorted, batches), key=lambda rows: -sum(row_costs[row] for row in rows))


def _exceeds(micro_batch_tokens: int, rows: Sequence[int], width: int) -> bool:
    """Whether one row more, the widest then being of that width, is too much; the first row never is."""
    return bool(rows) and (len(rows) + 1) * width > micro_batch_tokens


def partition(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Share samples among ranks so that their costs are even: the costliest goes to the rank that has least so far.

    Each rank's samples are in ascending order. Returns indices of the samples of each rank; some may be empty.
    """
    if num_ranks == 1:
        return [list(range(len(costs)))]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    return [sorted(share) for share in shares]
