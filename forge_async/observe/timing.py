"""How long an actor worked and how long it waited, between two readings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyReading:
    """What happened between two readings of a meter."""

    elapsed_s: float
    """Time between the readings."""
    busy_s: float
    """Time in which at least one piece of work was going on."""
    wait_s: float
    """Time in which at least one wait was going on."""

    @property
    def busy_fraction(self) -> float:
        """Busy share of the elapsed time, in [0, 1]; 0 when no time has passed."""
        return self.busy_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


class BusyMeter:
    """Accumulates busy and waiting seconds; overlapping spans count once, open spans count up to the reading.

    Work and waits are measured apart: a task that waits while another works adds to both.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._read_at_s = now_s()
        self._busy = _Union()
        self._wait = _Union()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the body as work."""
        yield from self._measure(self._busy)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the body as waiting."""
        yield from self._measure(self._wait)

    def _measure(self, union: _Union) -> Iterator[None]:
        union.enter(self._now_s())
        try:
            yield
        finally:
            union.leave(self._now_s())

    def read(self) -> BusyReading:
        """What happened since the last reading, and start anew."""
        now_s = self._now_s()
        elapsed_s, self._read_at_s = now_s - self._read_at_s, now_s
        return BusyReading(elapsed_s=elapsed_s, busy_s=self._busy.take(now_s), wait_s=self._wait.take(now_s))


class _Union:
    """Total length of a union of spans, some perhaps still open."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._since_s = 0.0
        self._num_open = 0

    def enter(self, now_s: float) -> None:
        if self._num_open == 0:
            self._since_s = now_s
        self._num_open += 1

    def leave(self, now_s: float) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._total_s += now_s - self._since_s

    def take(self, now_s: float) -> float:
        if self._num_open:
            self._total_s += now_s - self._since_s
            self._since_s = now_s
        total_s, self._total_s = self._total_s, 0.0
        return total_s
