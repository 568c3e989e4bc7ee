"""Processes that hold something of the weight store, to be killed while they do."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from forge_async.actors.forge_actor import ForgeActor, endpoint


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
