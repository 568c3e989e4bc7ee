"""The weight store of a loop of one's own: replaced when its process dies, with the newest version in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from forge_async.actors.forge_actor import ActorHandle, Hosts
from forge_async.actors.procs import before_stop_all
from forge_async.actors.service import Service
from forge_async.actors.store_actor import StoreActor
from forge_async.core.errors import ActorDiedError, ForgeError, unwrap
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.store_keeper import StoreKeeper, StoreRestart
from forge_async.weights.settings import WeightsSettings

T = TypeVar("T")
log = logging.getLogger(__name__)

NOBODY = "The store serves nobody yet: call store.serve(learner, policy) before weights travel."


class KeptStore:
    """A store's process and its successors, with the way of the weights through whichever is there.

    It lives in the process that started it, and needs a learner whose plan has `keeps_last` (`LearnerPlan.of` sees to
    that unless `weights.store_restarts` is 0).
    """

    def __init__(
        self, handle: ActorHandle, start: Callable[[], Awaitable[ActorHandle]], weights: WeightsSettings
    ) -> None:
        """`start` starts another process in place of that of `handle`."""
        self.handle = handle
        """The store that is there: give it to the learner and the policy."""
        self.on_restart: list[Callable[[StoreRestart], None]] = []
        """Called with each restart, when the new store has the newest version."""
        self._start, self._weights = start, weights
        self._keeper = StoreKeeper(self, weights.restarts, self._tell, remark=weights.why_no_restart)
        self._learner: ActorHandle | None = None
        self._policy: Service | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._publishing = asyncio.Lock()
        self._newest: PolicyVersion | None = None
        self._number = 0
        """Of the store that has `_newest`."""

    @classmethod
    async def start(
        cls, weights: WeightsSettings, hosts: Hosts | None = None, folder: str = "", **options: Any
    ) -> KeptStore:
        """Start the process. `folder` is as that of StoreActor, `options` are those of `StoreActor.options`."""
        actor = StoreActor.options(mesh_name="store", hosts=hosts, shared_gpus=weights.gpus, **options)

        async def start() -> ActorHandle:
            return await actor.as_actor(weights, folder)

        return cls(await start(), start, weights)

    def serve(self, learner: ActorHandle, policy: Service) -> KeptStore:
        """Say who publishes and who pulls; both were given `handle`. From now on a store that dies is replaced.

        Returns this object. Raises ForgeError when that was said before: it is kept for one learner and one policy.
        """
        if self._keeping is not None:
            raise ForgeError(f"{self.handle.name} serves others already; start another KeptStore for these.")
        self._learner, self._policy = learner, policy
        self._keeping = asyncio.ensure_future(self._keeper.run(self._fill))
        before_stop_all.append(self._let_go)
        return self

    async def publish(self, version: PolicyVersion) -> None:
        """Make a snapshot of the learner readable, and delete all but the newest `weights.keep_versions` versions.

        Raises ActorDiedError when a store died that is not replaced, and what the learner's `publish` raises.
        """
        async with self._publishing:
            await self._put(version)

    async def pull(self, version: PolicyVersion) -> list[Any]:
        """Have all replicas of the policy serve a version; or the newest one, where it was lost with its store.

        Returns what their `pull` does, by index. Raises ActorDiedError when a store died that is not replaced, and what
        the `pull` of a replica raises.
        """
        _, pulls = await self._through(lambda: self._pull(version))
        return pulls

    async def shutdown(self) -> None:
        """End the store's process, and replace it no more. May be called again."""
        self._let_go()
        if self._keeping is not None:
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self.handle.shutdown()

    async def wait_for_death(self) -> ActorDiedError:
        """Wait until the one that is there dies."""
        return await self.handle.watch.wait_for_death()

    async def replace(self) -> None:
        """Start another, and have all leave the one for the other: replicas that are respawned later too."""
        learner, policy = self._served
        await self.handle.shutdown()
        self.handle = await self._start()
        policy.renew(store=self.handle)
        address = await self.handle.handle.call_one(timeout_s=self._weights.timeout_s)
        await asyncio.gather(
            learner.join.call(address, self.handle, timeout_s=self._weights.timeout_s),
            policy.connect.fanout(address, timeout_s=self._weights.timeout_s),
        )

    @property
    def _served(self) -> tuple[ActorHandle, Service]:
        if self._learner is None or self._policy is None:
            raise ForgeError(NOBODY)
        return self._learner, self._policy

    async def _put(self, version: PolicyVersion) -> None:
        learner, _ = self._served
        timeout_s, keep = self._weights.timeout_s, self._weights.keep_versions
        self._number, _ = await self._through(lambda: learner.publish.call_ranks(version, keep, timeout_s=timeout_s))
        self._newest = version

    async def _fill(self) -> PolicyVersion | None:
        """See to it that the newest version is in the store that is there; returns that version, if there is one.

        A publication under way does that by itself, and is waited for.
        """
        async with self._publishing:
            if self._newest is not None and self._number != self._keeper.number:
                await self._put(self._newest)
            return self._newest

    async def _pull(self, version: PolicyVersion) -> list[Any]:
        _, policy = self._served
        newest = await self._fill() if self._keeper.number else None
        return await policy.pull.fanout(newest or version, timeout_s=self._weights.timeout_s)

    async def _through(self, operation: Callable[[], Awaitable[T]]) -> tuple[int, T]:
        """Carry out an operation, anew on another store each time that it dies meanwhile; or raise why none comes."""
        keeping = self._keeping
        if keeping is None:
            raise ForgeError(NOBODY)
        doing = asyncio.ensure_future(self._keeper.through(operation))
        try:
            await asyncio.wait({doing, keeping}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            if keeping.cancelled():
                raise ActorDiedError(f"{self.handle.name} was shut down.")
            raise unwrap(keeping.exception() or ActorDiedError(f"{self.handle.name} is watched no more."))
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    def _tell(self, restart: StoreRestart) -> None:
        log.warning("%s", restart.sentence)
        for notify in self.on_restart:
            try:
                notify(restart)
            except Exception:  # a user's function: whatever it raises is told, and the store is there all the same
                log.exception("A callback in on_restart of %s raised; the store serves all the same.", self.handle.name)

    def _let_go(self) -> None:
        with contextlib.suppress(ValueError):
            before_stop_all.remove(self._let_go)
        if self._keeping is not None and not self._keeping.cancel() and not self._keeping.cancelled():
            self._keeping.exception()  # whoever publishes or pulls is told; nobody need have
