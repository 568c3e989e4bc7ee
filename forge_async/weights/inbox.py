"""What a member of a broadcast has received and nobody has taken yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 2
"""Values that are kept at most, the one that is arriving among them: who takes none in time reads the store."""


class Inbox(Generic[T]):
    """Values by number, as a thread puts them there in ascending order; others wait for the one they want."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s`: the clock that patience goes by."""
        self._now_s = now_s
        self._changed = threading.Condition()
        self._values: dict[int, T] = {}
        self._last = 0
        """The last number that arrived, or never will."""
        self._moved_s = 0.0
        self._num_abandoned = 0

    def progress(self) -> None:
        """Something happened that leads to the next value: patience begins anew."""
        with self._changed:
            self._moved_s = self._now_s()

    def begin(self) -> None:
        """Another value is arriving: make room for it."""
        with self._changed:
            for number in sorted(self._values)[: -(KEPT - 1)]:
                del self._values[number]
            self._moved_s = self._now_s()

    def put(self, number: int, value: T) -> None:
        """A value is here, whole."""
        with self._changed:
            self._values[number] = value
            self._last = number
            self._changed.notify_all()

    def miss(self, number: int) -> None:
        """A value will not come."""
        with self._changed:
            self._last = max(self._last, number)
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nothing that is waited for now will come."""
        with self._changed:
            self._num_abandoned += 1
            self._changed.notify_all()

    def take(self, number: int, stall_s: float, total_s: float) -> T | None:
        """Wait for a value, and have it for oneself; None when it will not come.

        Args:
            number: which one.
            stall_s: how long nothing may happen before the wait is given up.
            total_s: how long it may take however much happens.
        """
        begun = self._now_s()
        with self._changed:
            self._moved_s = max(self._moved_s, begun)
            num_abandoned = self._num_abandoned
            while number not in self._values and number > self._last and num_abandoned == self._num_abandoned:
                left_s = min(self._moved_s + stall_s, begun + total_s) - self._now_s()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return self._values.pop(number, None)
