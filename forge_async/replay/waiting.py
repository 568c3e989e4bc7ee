"""The replay room for callers who wait: for room to generate, and for batches. One event loop, one owner of the state.

Calls that change something are done at once and wake whoever waits; those who wait look again. Every wait has a
deadline on the injected clock and ends with a sentence that says what stood in the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from forge_async.core.clock import Clock, SystemClock
from forge_async.core.errors import StallError
from forge_async.core.records import Group
from forge_async.replay.admission import Admission
from forge_async.replay.state import ReplayState

T = TypeVar("T")
PATIENCE_S = 600.0
"""Deadline of a wait whose caller names none."""


class WaitingReplay:
    """An asyncio face on a `ReplayState`."""

    def __init__(self, replay_state: ReplayState, clock: Clock | None = None, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: deadline of waits whose caller names none, on `clock` (the machine's by default)."""
        self.inner = replay_state
        """The state itself; look at it, and change it only through this object."""
        self._clock = clock or SystemClock()
        self._patience_s = patience_s
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, at the next change."""

    async def admit(self, replica: str, max_groups: int, deadline_s: float | None = None) -> list[Admission]:
        """Groups for a replica to make, at least one and at most its fair share; none only when the run is closed.

        Raises StallError after `deadline_s` seconds, saying what stands in the way, unless the steps to come need no
        more groups: then the wait goes on until the last step is done.
        """
        patience_s = self._patience(deadline_s)

        def stalled() -> str | None:
            if self.inner.num_wanted() <= 0:
                return None
            return f"Replica {replica} was given no group for {patience_s:g} s: {self.inner.why_no_admission(replica)}."

        return await self._when(
            lambda: self.inner.admit(replica, max_groups),
            lambda admissions: bool(admissions) or self.inner.ledger.closed,
            patience_s,
            stalled,
        )

    async def take(self, step: int, deadline_s: float | None = None) -> list[Group]:
        """The batch of `step`, sorted by admission index; the same batch when asked again.

        Raises StallError after `deadline_s` seconds, saying which groups are missing.
        """
        patience_s = self._patience(deadline_s)
        batch = await self._when(
            lambda: self.inner.take(step),
            lambda batch: batch is not None,
            patience_s,
            lambda: f"The learner waited {patience_s:g} s for a batch: {self.inner.why_no_batch()}.",
        )
        assert batch is not None
        return batch

    async def generated(self, tries: Sequence[tuple[int, int]]) -> None:
        """The tokens of these groups, (index, attempt), are all made."""
        self._waking(lambda: self.inner.generated(tries))

    async def put(self, groups: Sequence[Group]) -> int:
        """Take in scored groups; returns how many were new."""
        return self._waking(lambda: self.inner.put(groups))

    async def end(self, index: int, outcome: str, reason: str, attempt: int | None = None) -> bool:
        """End a group without training on it; returns whether that changed anything."""
        return self._waking(lambda: self.inner.end(index, outcome, reason, attempt))

    async def retry(self, index: int, reason: str, attempt: int) -> bool:
        """A try came to nothing: make the group anew, or end it as failed. Returns whether it is made anew."""
        return self._waking(lambda: self.inner.retry(index, reason, attempt))

    async def trained(self, step: int) -> None:
        """The steps up to `step` are done."""
        self._waking(lambda: self.inner.trained(step))

    async def published(self, step: int) -> None:
        """Version `step` can be pulled, so the steps that it comes after are done."""
        self._waking(lambda: self.inner.published(step))

    async def pulled(self, replica: str, step: int) -> None:
        """A replica serves version `step`."""
        self._waking(lambda: self.inner.pulled(replica, step))

    async def add_replica(self, replica: str, step: int) -> None:
        """A replica that serves version `step` may be given groups."""
        self._waking(lambda: self.inner.add_replica(replica, step))

    async def remove_replica(self, replica: str) -> None:
        """A replica is gone; its unfinished groups go to others."""
        self._waking(lambda: self.inner.remove_replica(replica))

    async def set_max_staleness(self, max_staleness: int) -> None:
        """Start groups under another bound on age from here on."""
        self._waking(lambda: self.inner.set_max_staleness(max_staleness))

    async def state(self) -> dict[str, float]:
        """Figures under the names of metrics.jsonl."""
        return self.inner.state()

    async def why(self) -> str:
        """What the next step waits for, in one sentence without full stop."""
        return self.inner.why_no_batch()

    async def close(self, reason: str) -> dict[str, float]:
        """Cancel what has not ended; everybody who waits for room is let go. Returns the final figures."""
        self._waking(lambda: self.inner.close(reason))
        return self.inner.state()

    def _patience(self, deadline_s: float | None) -> float:
        return self._patience_s if deadline_s is None else deadline_s

    def _waking(self, call: Callable[[], T]) -> T:
        """Make a call and, if it changed anything, wake those who wait."""
        before = self.inner.num_changes
        try:
            return call()
        finally:
            if self.inner.num_changes != before:
                self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _when(
        self, attempt: Callable[[], T], done: Callable[[T], bool], patience_s: float, stalled: Callable[[], str | None]
    ) -> T:
        """Try again after each change until `done`; `stalled` says what is wrong when that takes too long, or None."""
        result = self._waking(attempt)
        if done(result):
            return result
        deadline_s = self._clock.now_s() + patience_s
        alarm = asyncio.create_task(self._alarm(patience_s), name="deadline")
        try:
            while not done(result):
                await self._changed.wait()
                result = self._waking(attempt)
                if not done(result) and self._clock.now_s() >= deadline_s:
                    if cause := stalled():
                        raise StallError(cause)
                    deadline_s = self._clock.now_s() + patience_s
        finally:
            alarm.cancel()
        return result

    async def _alarm(self, every_s: float) -> None:
        """Wake those who wait, so that they look at the clock."""
        while True:
            await self._clock.sleep(every_s)
            self._wake()
