"""The weight store's process in a run: watched, and replaced when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from forge_async.actors.forge_actor import ActorHandle
from forge_async.core.errors import ActorDiedError


class RunningStore:
    """The store that is there, and those who are connected to it: the learner's ranks and the replicas."""

    def __init__(
        self,
        handle: ActorHandle,
        start: Callable[[], Awaitable[ActorHandle]],
        learner: ActorHandle,
        replicas: Sequence[ActorHandle],
        timeout_s: float,
    ) -> None:
        """Args:
        handle: of the first one, to which all are connected, or soon will be.
        start: starts another.
        learner, replicas: the ones to be connected with that.
        timeout_s: longest time for which they may take to change over.
        """
        self.handle, self._start = handle, start  # of the one that is there
        self._learner, self._replicas, self._timeout_s = learner, replicas, timeout_s

    @property
    def pid(self) -> int | None:
        """Of the process that is there, if it is on this machine."""
        return next((process.pid for process in self.handle.processes if process.is_local), None)

    async def wait_for_death(self) -> ActorDiedError:
        """Wait until the one that is there dies."""
        return await self.handle.watch.wait_for_death()

    async def replace(self) -> None:
        """End what is left of it, start another, and have everyone leave the one for the other.

        Raises ActorDiedError when the new one dies meanwhile or does not come to life, StallError when somebody takes
        too long to change over.
        """
        await self.handle.shutdown()
        self.handle = await self._start()
        address = await self.handle.handle.call_one(timeout_s=self._timeout_s)
        await asyncio.gather(
            self._learner.join.call(address, timeout_s=self._timeout_s),
            *(replica.connect.call_one(address, timeout_s=self._timeout_s) for replica in self._replicas),
        )
