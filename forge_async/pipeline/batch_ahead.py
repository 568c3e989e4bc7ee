"""Batches of consecutive steps, each asked for while the step before it is trained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from forge_async.core.clock import Clock, SystemClock
from forge_async.core.errors import StallError

T = TypeVar("T")


class BatchAhead(Generic[T]):
    """What a learner takes its batches through, so that the way from the replay actor costs it nothing.

    A batch that is taken early is no older for it: its age counts from the step that trains on it, and room for new
    groups is reckoned by what was taken (`replay/bound.py`), not by when.
    """

    def __init__(self, take: Callable[[int, float], Awaitable[T]], *, end: int, clock: Clock | None = None) -> None:
        """
        Args:
            take: asks for the batch of a step and waits for it, at most so many seconds; raises StallError after them.
            end: the step that no batch is asked for any more; 0: none is asked for ahead.
            clock: that the seconds are counted on; None: the machine's.
        """
        self._take, self._end, self._clock = take, end, clock or SystemClock()
        self._ahead: tuple[int, asyncio.Task[T]] | None = None

    async def take(self, step: int, deadline_s: float) -> T:
        """The batch of `step`, waited for at most `deadline_s` seconds from now on; the next one is then on its way."""
        begun_s, (ahead, self._ahead) = self._clock.now_s(), (self._ahead, None)
        if ahead is not None and ahead[0] == step:
            batch = await self._begun(ahead[1], begun_s, step, deadline_s)
        else:
            _drop(ahead)
            batch = await self._take(step, deadline_s)
        if step + 1 < self._end:
            task = asyncio.ensure_future(self._take(step + 1, deadline_s))
            task.add_done_callback(_look)
            self._ahead = (step + 1, task)
        return batch

    def close(self) -> None:
        """Ask for nothing any more."""
        ahead, self._ahead, self._end = self._ahead, None, 0
        _drop(ahead)

    async def _begun(self, task: asyncio.Task[T], begun_s: float, step: int, deadline_s: float) -> T:
        try:
            return await task
        except StallError:
            # Its deadline counts from when it was sent, while the step before was still at work.
            left_s = begun_s + deadline_s - self._clock.now_s()
            if left_s <= 0:
                raise
            return await self._take(step, left_s)


def _drop(ahead: tuple[int, asyncio.Task[T]] | None) -> None:
    if ahead is not None:
        ahead[1].cancel()


def _look(task: asyncio.Task[T]) -> None:
    """A failure is told to whoever takes the batch; when nobody does any more, it is not reported as forgotten."""
    if not task.cancelled():
        task.exception()
