"""The process that holds published weights."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from forge_async.actors.forge_actor import ForgeActor, concurrent_endpoint
from forge_async.weights.settings import WeightsSettings

if TYPE_CHECKING:
    from forge_async.backends.weight_stores import RunningStore


class StoreActor(ForgeActor):
    """Hosts the store of the chosen transport, and the meeting point of a learner's ranks."""

    def __init__(self, weights: WeightsSettings | None = None, folder: str = "") -> None:
        """`folder` is where files go, when the transport makes some and `weights.folder` is empty."""
        self._weights, self._folder = weights or WeightsSettings(), folder
        self._store: RunningStore | None = None
        self._meeting: dict[str, tuple[set[int], asyncio.Event]] = {}

    async def setup(self) -> None:
        from forge_async.backends.weight_stores import start_store

        self._store = await start_store(self._weights, self._folder)

    async def teardown(self) -> None:
        if self._store is not None:
            self._store.close()

    @concurrent_endpoint
    async def handle(self) -> bytes:
        """What `open_plane` makes a weight plane from, in any process of the run."""
        assert self._store is not None, "asked before its setup"
        return self._store.handle

    @concurrent_endpoint
    async def meet(self, key: str, rank: int, num_ranks: int) -> None:
        """Wait until all ranks have called with this key.

        Ranks of a learner meet here to publish. A rank that never comes is noticed by whoever called them all.
        """
        ranks, complete = self._meeting.setdefault(key, (set(), asyncio.Event()))
        ranks.add(rank)
        if len(ranks) == num_ranks:
            del self._meeting[key]
            complete.set()
        await complete.wait()
