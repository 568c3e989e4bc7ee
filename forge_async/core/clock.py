"""Time as a dependency, so that tests own it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from forge_async.core.errors import StallError

T = TypeVar("T")


class Clock(Protocol):
    """What the loops need of time."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Wait `duration_s` seconds of this clock."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(duration_s)


async def within(awaitable: Awaitable[T], timeout_s: float, *, who: str, waits_for: str, from_whom: str) -> T:
    """Await something, but not for ever.

    Raises StallError naming who waited, for what, and who should have answered, after `timeout_s` seconds.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError as error:
        if not deadline.expired():
            raise  # what was awaited failed by a time limit of its own
        raise StallError(
            f"{who} waited {timeout_s:g} s for {waits_for} from {from_whom}, which did not answer; "
            "see that process's log in the run directory."
        ) from error
