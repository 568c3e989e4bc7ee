"""Processes that are ready while others still start, or are being connected: the first that dies ends the start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from forge_async.core.errors import ForgeError

T = TypeVar("T")

NOTICE_S = 1.0
"""How long a start that failed waits for news of a death, which may be why: whoever calls the dead sees less of it."""

WaitForDeath = Callable[[], Awaitable[ForgeError]]


Watch = Callable[[WaitForDeath], None]
"""Says of a process that is ready how its death is waited for."""


async def watched_start(start: Callable[[Watch], Awaitable[T]], notice_s: float = NOTICE_S) -> T:
    """What `start` returns. Raises the first death of a process that it watches, and breaks off what else starts.

    Otherwise a death would be seen when the last process is ready, or as what a call on the dead makes of it.
    """
    died: asyncio.Future[ForgeError] = asyncio.get_running_loop().create_future()
    watches: list[asyncio.Task[None]] = []

    async def wait(wait_for_death: WaitForDeath) -> None:
        error = await wait_for_death()
        if not died.done():
            died.set_result(error)

    starting = asyncio.ensure_future(start(lambda death: watches.append(asyncio.ensure_future(wait(death)))))
    try:
        await asyncio.wait({starting, died}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done() and starting.exception() is not None and watches:
            await asyncio.wait({died}, timeout=notice_s)
        if died.done() and not (starting.done() and starting.exception() is None):
            raise died.result() from (starting.exception() if starting.done() else None)
        return await starting
    finally:
        for task in (starting, *watches):
            task.cancel()
        await asyncio.gather(starting, *watches, return_exceptions=True)
