"""The way of the weights: staged by every learner rank, committed, pulled by each replica, deleted when unread.

A store may die at any of these and be replaced by an empty one. The newest version comes into that first, whole and
with the same bits, since learner ranks keep what they staged last; what the death broke off is tried again then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from forge_async.core.errors import DeltaError, one_sentence
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import Learner, Pull, Replay, Replica
from forge_async.pipeline.store_keeper import SteadyStore, StoreKeeper
from forge_async.weights.retention import Committed, Retention


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
        self,
        learner: Learner,
        replay: Replay,
        keep_versions: int,
        now_s: Callable[[], float] = time.time,
        store: StoreKeeper | SteadyStore | None = None,
    ) -> None:
        """Args:
        learner: its ranks.
        replay: is told of what becomes readable.
        keep_versions: so many stay, beside those that are read.
        now_s: the wall clock that publications are stamped with.
        store: says through which of its deaths an operation is to go on; None: its failures are final.
        """
        self._learner, self._replay, self._now_s = learner, replay, now_s
        self._store = store or SteadyStore()
        self._retention = Retention(keep_versions)
        self._number = 0
        """Of the store that `_retention` speaks of."""
        self._changed = asyncio.Condition()
        self._committing = asyncio.Lock()
        """Held while a version is staged and committed, until all who should know of it do."""

    async def publish(self, version: PolicyVersion) -> Publication:
        """Make a snapshotted version readable, then delete what nobody needs any more.

        What can be said before to be superseded by it is deleted in the same call; who asks for that meanwhile is given
        a newer version. The rest, which somebody read until then or which it alone supersedes, is deleted after it.
        """
        started_s = self._now_s()
        async with self._committing:
            superseded = self._retention.take_deletable(coming=1)
            number, committed = await self._store.through(lambda: self._put(version, superseded))
            duration_s = self._now_s() - started_s
            await self._replay.published(version.step)
            await self._note(number, version, committed)
        for old in self._retention.take_deletable():
            await self._store.through(lambda old=old: self._learner.retire(old))
        return Publication(
            version=version,
            started_s=started_s,
            duration_s=duration_s,
            num_bytes=committed.num_bytes,
            changed_fraction=committed.num_changed / committed.num_elements if committed.num_elements else None,
        )

    async def republish(self) -> PolicyVersion | None:
        """See to it that the newest version is in the store that is there now; returns that version, if there is one.

        A publication under way does that by itself, and is waited for.
        """
        async with self._committing:
            newest = self._retention.newest
            if newest is not None and self._number != self._store.number:
                number, committed = await self._store.through(lambda: self._put(newest))
                await self._note(number, newest, committed)
            return newest

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

        A replica that cannot rebuild it from its deltas gets the newest version instead, which is published whole; so
        does one whose version was lost with its store.
        """
        return (await self._store.through(lambda: self._pull(replica, version)))[1]

    async def _put(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        await self._learner.stage(version)
        return await self._learner.commit(version, retire)

    async def _note(self, number: int, version: PolicyVersion, committed: Committed) -> None:
        """A version can be read in the store of that number."""
        async with self._changed:
            if number != self._number:
                self._retention.lost()
            self._number = number
            self._retention.published(version, committed.needs)
            self._changed.notify_all()

    async def _pull(self, replica: Replica, version: PolicyVersion) -> Pull:
        async with self._changed:  # the store's first version ends this wait
            await self._changed.wait_for(lambda: self._number == self._store.number)
        try:
            return await self._leased_pull(replica, self._readable(version))
        except DeltaError as error:
            damage = one_sentence(error)
        pull = await self._leased_pull(replica, await self._newest_whole())
        return replace(pull, damage=damage)

    def _readable(self, version: PolicyVersion) -> PolicyVersion:
        """A version, or the newest one where it is gone."""
        newest = self._retention.newest
        return version if newest is None or self._retention.holds(version) else newest

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
