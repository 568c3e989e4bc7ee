"""Event loops that skip the time in which nothing happens: hours of a simulated run pass in seconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from forge_async.core.errors import StallError

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """Adds to a sum what it should have waited, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise StallError(
                "Nothing in this simulation can ever go on: every task waits for another, and no timer runs."
            )
        self.skipped_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that waits for timers and for itself only, not for threads, processes or sockets."""

    def __init__(self, *, count_work: bool = False) -> None:
        """`count_work`: the loop's time also counts the CPU seconds of this process, so that it is what a clock on the
        wall would show on a machine without other work; without it code takes no time, and a run repeats exactly."""
        self._skipping = _Skipping()
        self._begun_s = time.process_time() if count_work else None
        super().__init__(self._skipping)

    def time(self) -> float:
        worked_s = 0.0 if self._begun_s is None else time.process_time() - self._begun_s
        return self._skipping.skipped_s + worked_s


class LoopClock:
    """A `Clock` on the time of the running event loop, whichever it is."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


def run_virtually(coroutine: Coroutine[Any, Any, T], *, count_work: bool = False) -> T:
    """Run to the end on a VirtualLoop. Raises StallError when every task waits and no timer runs."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(count_work=count_work)) as runner:
        return runner.run(coroutine)
