"""The store's death, mended inside a run: a new process, everyone connected to it, the newest version published there.

    store dies ─► what was under way fails, and waits ─► a new process, all connect ─► all is tried again there
                                                                                  └──► the newest version, whole

Nothing else stops meanwhile: the learner steps, and replicas go on with the weights that they serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forge_async.core.errors import ActorDiedError, ForgeError, one_sentence
from forge_async.core.versions import PolicyVersion

T = TypeVar("T")

NOTICE_S = 1.0
"""How long a failure waits for news of the store's death, which its client may have had a moment earlier."""


class Store(Protocol):
    """The store's process, from the side of whoever has it replaced."""

    async def wait_for_death(self) -> ForgeError:
        """Wait until the one that is there dies; the error names it and how it ended."""
        ...

    async def replace(self) -> None:
        """End what is left of it, start another, and have everyone leave the one for the other. Raises ForgeError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRestart:
    """A store that died and was replaced."""

    number: int
    """How many processes have been started in place of dead ones by now."""
    limit: int
    """How many there may be."""
    cause: str
    """How the old one ended, in a sentence."""
    died_s: float
    """Wall clock at which that was noticed."""
    duration_s: float
    """Until the new one had a version."""
    version: PolicyVersion | None
    """The newest version in the new one then; None when none had been published yet."""
    num_repeated: int = 0
    """Publications, pulls and deletions that the death had broken off by then, and that were tried again."""

    @property
    def sentence(self) -> str:
        """For people."""
        has = f"has {self.version}" if self.version is not None else "is there"
        took = f"{self.duration_s:.1f} s later ({self.number} of {self.limit})"
        count = self.num_repeated
        what = f"{count} operation{'' if count == 1 else 's'}"
        again = f" {what} that it broke off {'was' if count == 1 else 'were'} tried again." if count else ""
        return f"{self.cause} Another took its place and {has}, {took}.{again}"

    @property
    def record(self) -> dict[str, Any]:
        """For files."""
        step = None if self.version is None else self.version.step
        told = {"number": self.number, "cause": self.cause, "duration_s": self.duration_s, "version": step}
        return told | {"repeated": self.num_repeated}


class SteadyStore:
    """A store whose failures are final."""

    number = 0

    async def through(self, operation: Callable[[], Awaitable[T]]) -> tuple[int, T]:
        """Carry out an operation of the store."""
        return self.number, await operation()


class StoreKeeper:
    """Replaces a store that dies, and has what its death broke off be tried again."""

    def __init__(
        self,
        store: Store,
        limit: int,
        told: Callable[[StoreRestart], None] = lambda restart: None,
        now_s: Callable[[], float] = time.time,
        notice_s: float = NOTICE_S,
        remark: str = "",
    ) -> None:
        """Args:
        store: what is replaced.
        limit: how many processes may be started in place of dead ones, also those that do not come to life.
        told: hears of each store that was replaced, when the new one has a version.
        now_s: the wall clock.
        notice_s: as NOTICE_S.
        remark: what the error says beside the death where `limit` is 0.
        """
        self.number = 0
        """Of the store that is there, or was last: how many there were before."""
        self._store, self._limit, self._told = store, limit, told
        self._now_s, self._notice_s, self._remark = now_s, notice_s, remark
        self._num_started = 0
        self._num_broken = 0
        """Operations that were tried again, and that no restart has told of."""
        self._there, self._ended = asyncio.Event(), asyncio.Event()
        self._there.set()

    async def run(self, republish: Callable[[], Awaitable[PolicyVersion | None]]) -> None:
        """Watch the store; ends only by cancellation, or with the error of the death that is one too many.

        `republish` sees to it that the newest version is in the store that is there; returns that version.
        """
        async with asyncio.TaskGroup() as group:
            while True:
                death = await self._store.wait_for_death()
                died_s = self._now_s()
                self._there.clear()
                self._ended.set()
                await self._replace(death)
                self.number += 1
                self._ended = asyncio.Event()
                self._there.set()
                group.create_task(self._fill(republish, death, died_s), name="republish")

    async def through(self, operation: Callable[[], Awaitable[T]]) -> tuple[int, T]:
        """Carry out an operation of the store, anew on another store each time that it dies meanwhile.

        Returns the number of the store that did it, and the result. `run` ends the wait for another store.
        """
        while True:
            await self._there.wait()
            number, ended = self.number, self._ended
            try:
                return number, await operation()
            except Exception:  # whatever a client makes of a store that is gone
                if not await self._has(ended):
                    raise
                self._num_broken += 1

    async def _has(self, ended: asyncio.Event) -> bool:
        # Not wait_for, which in Python 3.11 loses a cancellation that comes together with the news.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._notice_s):
                await ended.wait()
        return ended.is_set()

    async def _replace(self, death: ForgeError) -> None:
        error = death
        while self._num_started < self._limit:
            self._num_started += 1
            try:
                await self._store.replace()
            except ForgeError as failure:  # it died at once, or never came to life
                error = failure
            else:
                return
        if self._limit:
            failed = "" if error is death else f"; the last one did not come to life: {one_sentence(error)}"
            remark = f"No other takes its place: weights.store_restarts={self._limit} are used up{failed or '.'}"
        else:
            remark = self._remark
        raise ActorDiedError(f"{one_sentence(death)} {remark}".strip()) from error

    async def _fill(
        self, republish: Callable[[], Awaitable[PolicyVersion | None]], death: ForgeError, died_s: float
    ) -> None:
        number = self._num_started
        version = await republish()
        num_repeated, self._num_broken = self._num_broken, 0
        self._told(
            StoreRestart(
                number=number,
                limit=self._limit,
                cause=one_sentence(death),
                died_s=died_s,
                duration_s=self._now_s() - died_s,
                version=version,
                num_repeated=num_repeated,
            )
        )
