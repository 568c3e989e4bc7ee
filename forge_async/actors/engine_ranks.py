"""The tensor-parallel ranks of an engine as actors that its replica owns: started, watched and ended with it."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from forge_async.actors.forge_actor import ActorHandle, ForgeActor, Hosts, concurrent_endpoint  # first: see there

# isort: split
from monarch.actor import current_rank

from forge_async.actors.liveness import Process, Watch
from forge_async.core.versions import PolicyVersion
from forge_async.policy.settings import PolicySettings

if TYPE_CHECKING:
    from forge_async.backends.vllm_rank import VllmRank
    from forge_async.weights.manifest import Manifest
    from forge_async.weights.plane import WeightPlane
    from forge_async.weights.records import ReadReport
    from forge_async.weights.reshard import Wanted

T = TypeVar("T")
log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 600.0
"""Longest time of one call of the engine on its ranks: building them, or one step, the first of which may compile."""


class EngineRank(ForgeActor):
    """One rank. The model is touched from one thread, so that the actor stays free to fetch, and to notice deaths."""

    def __init__(self, owner: Process, num_ranks: int, compiles: bool, threads: int = 1) -> None:
        """`owner`: the replica's process; when it ends, however it ends, the rank ends too."""
        self._owner, self._num_ranks, self._compiles, self._threads = owner, num_ranks, compiles, threads
        self._number = current_rank().rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rank")
        self._rank: VllmRank | None = None
        self._plane: WeightPlane | None = None
        self._fetched = AsyncExitStack()
        self._watching: asyncio.Task[None] | None = None
        self._making: asyncio.Task[VllmRank] | None = None

    async def setup(self) -> None:
        self._watching = asyncio.create_task(self._end_with_owner())
        self._making = asyncio.create_task(self._run(self._make))  # while the replica imports vLLM too

    @concurrent_endpoint
    async def build(self, blob: bytes) -> list[Wanted]:
        """Make the model; returns what this rank holds of it. Call on all ranks."""
        assert self._making is not None, "asked before its setup"
        self._rank = await self._making
        return await self._run(lambda: self._model.build(blob))

    @concurrent_endpoint
    async def run(self, blob: bytes, everyone: bool) -> bytes:
        """Call a method of vLLM's worker. Call on all ranks; without `everyone` only the first one's result counts."""
        return await self._run(lambda: self._model.run(blob, everyone or self._number == 0))

    @concurrent_endpoint
    async def connect(self, store_handle: bytes) -> None:
        """Join the weight store, in place of one that is dead if it had joined one."""
        from forge_async.backends.weight_stores import open_plane

        old, self._plane = self._plane, open_plane(store_handle)
        self._plane.plan_for = self._model.plan_for
        self._model.fetch_as(shared=self._plane.store.transport.is_shared)
        if old is not None:
            await old.store.close()

    @concurrent_endpoint
    async def fetch(self, version: PolicyVersion) -> ReadReport:
        """Hold a version, this rank's slices of it, until `release`; returns what that took."""
        assert self._plane is not None, "fetched before it was connected"
        await self._fetched.aclose()
        manifest, blobs = await self._fetched.enter_async_context(self._plane.reading(version))
        await asyncio.to_thread(self._model.stage, manifest, blobs)
        return self._plane.last_read

    @concurrent_endpoint
    async def release(self) -> None:
        """Let go of what was fetched."""
        self._model.forget()
        await self._fetched.aclose()

    @concurrent_endpoint
    async def load(self) -> None:
        """Copy what was fetched into the parameters. Call on all ranks, between two steps."""
        await self._run(self._model.load)

    @concurrent_endpoint
    async def read(self, names: list[str]) -> list[tuple[Wanted, Any]]:
        """What is served of some parameters."""
        return await self._run(lambda: self._model.read(names))

    @property
    def _model(self) -> VllmRank:
        assert self._rank is not None, "asked before it was built"
        return self._rank

    def _make(self) -> VllmRank:
        from forge_async.backends.vllm_rank import VllmRank

        return VllmRank(self._number, self._num_ranks, compiles=self._compiles, threads=self._threads)

    async def _end_with_owner(self) -> None:
        await Watch("the replica", (self._owner,)).wait_for_death()
        os._exit(1)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


class OwnRanks:
    """The ranks, from the replica that owns them: awaited by its loop, and called by its engine's thread."""

    def __init__(self, handle: ActorHandle) -> None:
        self.handle = handle
        self.num_ranks = len(handle.processes)
        self._loop = asyncio.get_running_loop()
        self._asking: set[asyncio.Task[None]] = set()
        self._context = contextvars.copy_context()
        """Monarch's, of this actor: the engine's thread has none, and would pass for a client of its own."""

    @classmethod
    async def start(
        cls,
        name: str,
        policy: PolicySettings,
        hosts: Hosts | None,
        gpus: tuple[int, ...],
        shared_gpus: tuple[int, ...] = (),
    ) -> OwnRanks:
        """Start the processes; the engine builds its model in them.

        Args:
            name: the replica's.
            policy: how many, and whether they compile.
            hosts: the host of the replica; None: this one.
            gpus: one for each rank; empty: none.
            shared_gpus: what every rank sees beside its own.
        """
        num_ranks = policy.tensor_parallel
        options = EngineRank.options(
            mesh_name=f"{name}_ranks", procs=num_ranks, hosts=hosts, gpus=gpus, shared_gpus=shared_gpus
        )
        return cls(await options.as_actor(Process.current(), num_ranks, policy.compile, policy.threads))

    async def connect(self, store_handle: bytes) -> None:
        """Have every rank join the weight store."""
        await self.handle.connect.call_ranks(store_handle, timeout_s=CALL_TIMEOUT_S)

    @asynccontextmanager
    async def fetched(self, version: PolicyVersion, plane: WeightPlane) -> AsyncIterator[tuple[Manifest, ReadReport]]:
        """Around a load: every rank has its slices of a version at hand. Gives its manifest and what it took."""
        manifest = await plane.manifest(version)
        try:
            yield manifest, _together(await self.handle.fetch.call_ranks(version))
        finally:
            self.handle.release.broadcast()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all ranks, from the engine's thread."""
        return self.call_later(method, *args)()

    def call_later(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Begin a call of all ranks, from the engine's thread; what is returned waits for it."""
        answer: Future[list[Any]] = Future()

        async def ask() -> None:
            try:
                answer.set_result(await getattr(self.handle, method).call_ranks(*args, timeout_s=CALL_TIMEOUT_S))
            except Exception as error:  # noqa: BLE001  the engine's thread, which waits, has to hear of it
                answer.set_exception(error)

        def begin() -> None:
            task = asyncio.ensure_future(ask())
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

        self._loop.call_soon_threadsafe(begin, context=self._context)
        return answer.result

    async def close(self) -> None:
        """End the processes."""
        await self.handle.shutdown()


def _together(reads: Sequence[ReadReport]) -> ReadReport:
    """What all ranks together read and hold, and the first damage that one of them found."""
    first = reads[0]
    return dataclasses.replace(
        first,
        num_bytes=sum(read.num_bytes for read in reads),
        own_bytes=sum(read.own_bytes for read in reads),
        damage=next((read.damage for read in reads if read.damage), ""),
    )
