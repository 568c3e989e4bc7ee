"""Processes that hold something of the weight store, to be killed while they do."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from forge_async.actors.forge_actor import ActorHandle, ForgeActor, concurrent_endpoint, endpoint
from forge_async.core.versions import PolicyVersion

SIZE = 1 << 16
"""Elements of what a Writer publishes."""


class FarStore(ForgeActor):
    """Hosts a volume whose segments are no shared memory."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @endpoint
    async def address(self) -> Any:
        """Where it is. Called once."""
        from forge_async.backends.torchstore_store import start_volume
        from tests.far_memory import FileMemory

        return await start_volume(FileMemory(self._folder))


class Holder(ForgeActor):
    """A client of the store that keeps a reservation or a lease."""

    def __init__(self) -> None:
        self._held = AsyncExitStack()
        self._kept: list[Any] = []

    @endpoint
    async def join(self, handle: bytes) -> str:
        """Open a client; returns its transport's name."""
        from forge_async.backends.weight_stores import open_store

        self._store = open_store(handle)
        return self._store.transport.name

    @endpoint
    async def reserve(self, num_bytes: int) -> None:
        """Take memory, write half of it, and put it nowhere."""
        blob = await self._store.reserve(num_bytes)
        blob[: num_bytes // 2] = 1
        self._kept.append(blob)

    @endpoint
    async def hold(self, key: str) -> int:
        """Read a key and keep it; returns its first byte."""
        [value] = await self._held.enter_async_context(self._store.reading([key]))
        self._kept.append(value)
        return int(value[0])

    @endpoint
    async def lease(self, key: str) -> None:
        """Begin to read a key, and never end."""
        await self._held.enter_async_context(self._store._leasing([key]))

    @endpoint
    async def first_bytes(self) -> list[int]:
        """Of all that is kept."""
        return [int(each[0]) for each in self._kept]

    @endpoint
    async def end_reading(self) -> None:
        """Give back all that is held."""
        await self._held.aclose()


class Writer(ForgeActor):
    """A learner of one rank, from the side of the weight store: version v is a tensor full of v."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    async def setup(self) -> None:
        self._open(await self._store.handle.call_one())

    @concurrent_endpoint
    async def join(self, store_handle: bytes, store: ActorHandle) -> None:
        self._store = store
        self._open(store_handle)

    def _open(self, store_handle: bytes) -> None:
        from forge_async.backends.weight_stores import open_plane

        self._plane = open_plane(store_handle)

    @concurrent_endpoint
    async def publish(self, version: PolicyVersion, keep_versions: int) -> None:
        import torch

        from forge_async.weights.packing import LocalShard, Packer

        tensor = torch.full((SIZE,), float(version.step))
        shard = LocalShard(name="w", tensor=tensor, global_shape=(SIZE,), offsets=(0,))
        await self._plane.stage(version, *Packer(0).pack([shard], await self._plane.store.reserve(4 * SIZE)))
        await self._store.meet.call_one(str(version), 0, 1)
        await self._plane.commit(version)
        await self._plane.retire_all_but(keep_versions)


class Reader(ForgeActor):
    """A policy replica, from the same side. It joins the store that its constructor names, and leaves it for others."""

    def __init__(self, store: ActorHandle) -> None:
        self._store = store

    async def setup(self) -> None:
        self._open(await self._store.handle.call_one())

    @concurrent_endpoint
    async def connect(self, store_handle: bytes) -> None:
        self._open(store_handle)

    def _open(self, store_handle: bytes) -> None:
        from forge_async.backends.weight_stores import open_plane

        self._plane = open_plane(store_handle)

    @concurrent_endpoint
    async def pull(self, version: PolicyVersion) -> float:
        """The value of a version's tensor."""
        from forge_async.weights.packing import unpack

        async with self._plane.reading(version) as (manifest, blobs):
            [value] = unpack(manifest, blobs)["w"].unique().tolist()
        return value

    @concurrent_endpoint
    async def versions(self) -> list[int]:
        return [version.step for version in await self._plane.versions()]
