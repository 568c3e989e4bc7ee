"""Which ready groups the next step takes, and how far it may look past a straggler."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from forge_async.core.errors import ConfigError

Key = Callable[[int, int], tuple[int, ...]]
"""Of a ready group's (admission index, step of its oldest token), the smaller the sooner."""


def _by_admission(index: int, oldest_step: int) -> tuple[int, ...]:
    return (index,)


def _by_freshness(index: int, oldest_step: int) -> tuple[int, ...]:
    return (-oldest_step, index)


ORDERS: dict[str, Key] = {"fifo": _by_admission, "windowed_fifo": _by_admission, "freshest": _by_freshness}
"""The orders by name. `fifo` is strict admission order whatever the window; the others choose inside the window."""


def select(
    untaken: Sequence[int], ready: Mapping[int, int], *, window: int, groups_per_step: int, order: str
) -> tuple[int, ...] | None:
    """Choose the groups of the next step, or None while there are not enough.

    Groups are picked one after the other. Each pick has an index below (oldest untaken index + window), where groups
    already picked, like ended ones, no longer count as untaken; among those the order decides.

    Args:
        untaken: sorted admission indices of all groups waiting, in flight or ready.
        ready: step of the oldest token of each ready group, by index; a subset of `untaken`.
        window: W, in groups.
        groups_per_step: P.
        order: a name in ORDERS.

    Returns: P indices sorted by admission, or None.
    """
    if order not in ORDERS:
        raise ConfigError(f"async.order={order} is not one of {', '.join(ORDERS)}.")
    if len(ready) < groups_per_step:
        return None
    key, width = ORDERS[order], 1 if order == "fifo" else window
    blocked = next((index for index in untaken if index not in ready), None)
    end = len(untaken) if blocked is None else bisect_left(untaken, blocked + width)
    candidates = [index for index in untaken[:end] if index in ready]
    if len(candidates) < groups_per_step:
        return None
    return _pick(candidates, ready, key, width, groups_per_step)


def _pick(
    candidates: Sequence[int], ready: Mapping[int, int], key: Key, width: int, groups_per_step: int
) -> tuple[int, ...]:
    """Pick P of the sorted `candidates`, sliding the window; the unpicked oldest candidate holds it back."""
    picked: set[int] = set()
    heap: list[tuple[tuple[int, ...], int]] = []
    oldest = entered = 0
    while len(picked) < groups_per_step:
        while candidates[oldest] in picked:
            oldest += 1
        while entered < len(candidates) and candidates[entered] < candidates[oldest] + width:
            heapq.heappush(heap, (key(candidates[entered], ready[candidates[entered]]), candidates[entered]))
            entered += 1
        picked.add(heapq.heappop(heap)[1])
    return tuple(sorted(picked))
