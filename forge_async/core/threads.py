"""Work on another thread that uses what its caller gives back afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def to_thread_and_back(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`asyncio.to_thread`, whose cancellation waits until the work has ended.

    A thread cannot be broken off. A caller that went on without it would give back memory that is still read, or lend
    it to the next while it is still written. The work must end by itself.
    """
    working: asyncio.Future[Any] = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait({working})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        working.exception()  # seen: whoever gave up does not ask for it
        raise cancelled
    return working.result()
