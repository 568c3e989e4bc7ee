"""The process that holds published weights."""

from __future__ import annotations

import asyncio
from typing import Any

from forge_async.actors.forge_actor import ForgeActor, concurrent_endpoint


class StoreActor(ForgeActor):
    """Hosts torchstore's volume and controller."""

    def __init__(self) -> None:
        self._handle = b""
        self._gathering: dict[str, tuple[dict[int, Any], asyncio.Event]] = {}

    async def setup(self) -> None:
        from forge_async.backends.torchstore_store import start_store

        self._handle = await start_store()

    @concurrent_endpoint
    async def handle(self) -> bytes:
        """What a `TorchstoreStore` is made from, in any process of the run."""
        return self._handle

    @concurrent_endpoint
    async def gather(self, key: str, rank: int, num_ranks: int, part: Any) -> list[Any]:
        """Give one rank's part of something and wait for those of all others; returns all, in order of rank.

        Ranks of a learner meet here to publish. A rank that never comes is noticed by whoever called them all.
        """
        parts, complete = self._gathering.setdefault(key, ({}, asyncio.Event()))
        parts[rank] = part
        if len(parts) == num_ranks:
            del self._gathering[key]
            complete.set()
        await complete.wait()
        return [parts[number] for number in range(num_ranks)]
