"""Which samples share a row, which rows share a micro-batch, which rank computes what. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence


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
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((row for row, room in enumerate(free) if lengths[index] <= room), None)
        if place is None:
            rows.append([index])
            free.append(row_tokens - lengths[index])
        else:
            rows[place].append(index)
            free[place] -= lengths[index]
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


def partition(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share samples among ranks so that the tokens are even: the longest goes to the rank that has least so far.

    Each rank's samples are in ascending order. Returns indices of the samples of each rank; some may be empty.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        shares[rank].append(index)
        load[rank] += lengths[index]
    return [sorted(share) for share in shares]
