"""How a blob is cut into buckets: slices that travel one after the other, two of them at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

IN_FLIGHT = 2
"""Buckets under way at once: one is filled, or waits its turn, while the other travels."""


def buckets(num_bytes: int, bucket_bytes: int) -> Iterator[slice]:
    """The buckets of a blob, in order: each of `bucket_bytes`, the last one of what is left."""
    return (slice(start, min(start + bucket_bytes, num_bytes)) for start in range(0, num_bytes, bucket_bytes))


def carry(cut: Iterable[slice], start: Callable[[slice], Callable[[], None]]) -> None:
    """Carry buckets in order, at most `IN_FLIGHT` of them at once.

    Args:
        cut: the buckets.
        start: sets one off, and returns what waits until it has arrived.
    """
    under_way: deque[Callable[[], None]] = deque()
    for bucket in cut:
        if len(under_way) == IN_FLIGHT:
            under_way.popleft()()
        under_way.append(start(bucket))
    while under_way:
        under_way.popleft()()
