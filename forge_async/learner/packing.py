"""Which samples share a row, which rows share a micro-batch, which rank computes what. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence


def sample_costs(lengths: Sequence[int], attention_tokens: int) -> list[float]:
    """What each sample costs, in tokens of short samples: L + L^2 / attention_tokens.

    The part that is linear in the length is that of the projections, the quadratic one is attention's; both are equal
    at a length of `attention_tokens`.
    """
    return [length + length * length / attention_tokens for length in lengths]


def pack_rows(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """First-fit decreasing: put samples into as few rows of `row_tokens` tokens as this simple rule finds.

    A sample longer than a row gets a row of its own. Rows, and samples inside a row, keep ascending order of their
    first member, so that equal inputs always give the same batches.

    Args:
        lengths: tokens of each sample.
        row_tokens: tokens of a row.

    Returns indices of the samples of each row.
    """
    rows: list[list[int]] = []
    free: list[int] = []
    place, before = 0, -1
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length != before:  # where one did not fit, others of its length do not either
            place, before = 0, length
        while place < len(rows) and length > free[place]:
            place += 1
        if place == len(rows):
            rows.append([])
            free.append(row_tokens)
        rows[place].append(index)
        free[place] -= length
    return sorted(sorted(row) for row in rows)


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
    load, widest = [0.0] * count, [0] * count
    for row in sorted(range(len(row_widths)), key=lambda r: (-row_costs[r], r)):
        width = row_widths[row]
        fits = (
            at
            for at, rows in enumerate(batches)
            if not rows or (len(rows) + 1) * max(widest[at], width) <= micro_batch_tokens
        )
        place = min(fits, key=lambda at: (load[at], at), default=None)
        if place is None:
            batches = micro_batches(row_widths, micro_batch_tokens)
            batches += [[] for _ in range(count - len(batches))]
            break
        batches[place].append(row)
        load[place] += row_costs[row]
        widest[place] = max(widest[place], width)
    return sorted(map(sorted, batches), key=lambda rows: -sum(row_costs[row] for row in rows))


def partition(costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Share samples among ranks so that their costs are even: the costliest goes to the rank that has least so far.

    Each rank's samples are in ascending order. Returns indices of the samples of each rank; some may be empty.
    """
    if num_ranks == 1:
        return [list(range(len(costs)))]
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        shares[rank].append(index)
        load[rank] += costs[index]
    return [sorted(share) for share in shares]
