"""The way of the weights: staged by every learner rank, committed, pulled by each replica, deleted when unread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from forge_async.core.errors import DeltaError, one_sentence
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import Learner, Pull, Replay, Replica
from forge_async.weights.retention import Retention


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """How a version became readable."""

    version: PolicyVersion
    started_s: float
    """Wall clock."""
    duration_s: float
    num_bytes: int
    """Of what was put into the store."""
    changed_fraction: float | None = None
    """Share of the elements whose bits changed since the version before; None when it was published whole."""


class Publisher:
    """Publishes versions in order, and lets replicas wait for one that is newer than theirs."""

    def __init__(
        self, learner: Learner, replay: Replay, keep_versions: int, now_s: Callable[[], float] = time.time
    ) -> None:
        """`now_s` is the wall clock that publications are stamped with."""
        self._learner, self._replay, self._now_s = learner, replay, now_s
        self._retention = Retention(keep_versions)
        self._changed = asyncio.Condition()
        self._committing = asyncio.Lock()
        """Held while a version is staged and committed."""

    async def publish(self, version: PolicyVersion, trained: Awaitable[None] | None = None) -> Publication:
        """Make a snapshotted version readable, then delete what nobody needs any more.

        `trained` ends when the replay actor knows of the step that made it; None: it does, or there was none.
        """
        started_s = self._now_s()
        async with self._committing:
            await self._learner.stage(version)
            committed = await self._learner.commit(version)
        duration_s = self._now_s() - started_s
        if trained is not None:
            await trained
        await self._replay.published(version.step)
        async with self._changed:
            self._retention.published(version, committed.needs)
            self._changed.notify_all()
        for old in self._retention.take_deletable():
            await self._learner.retire(old)
        return Publication(
            version=version,
            started_s=started_s,
            duration_s=duration_s,
            num_bytes=committed.num_bytes,
            changed_fraction=committed.num_changed / committed.num_elements if committed.num_elements else None,
        )

    async def newer_than(self, version: PolicyVersion | None) -> PolicyVersion:
        """Wait until the newest readable version is newer than `version`, and return it.

        The learner's publications end this wait; when the learner fails, the run's task group does.
        """
        async with self._changed:
            while (newest := self._retention.newest) is None or (version is not None and newest <= version):
                await self._changed.wait()
            return newest

    async def pull(self, replica: Replica, version: PolicyVersion) -> Pull:
        """Have a replica serve a version, which stays readable meanwhile.

        A replica that cannot rebuild it from its deltas gets the newest version instead, which is published whole.
        """
        try:
            return await self._leased_pull(replica, version)
        except DeltaError as error:
            damage = one_sentence(error)
        pull = await self._leased_pull(replica, await self._newest_whole())
        return replace(pull, damage=damage)

    async def _leased_pull(self, replica: Replica, version: PolicyVersion) -> Pull:
        self._retention.lease(version)
        try:
            return await replica.pull(version)
        finally:
            self._retention.release(version)

    async def _newest_whole(self) -> PolicyVersion:
        """The newest version, published again where it is a delta: no later one may build on what is damaged."""
        async with self._committing:
            newest = self._retention.newest
            assert newest is not None, "a version was pulled, so one was published"
            if not self._retention.is_whole(newest):
                await self._learner.restage(newest)
                committed = await self._learner.commit(newest)
                self._retention.published(newest, committed.needs)
            return newest
