"""The process that holds published weights."""

from __future__ import annotations

from forge_async.actors.forge_actor import ForgeActor, concurrent_endpoint


class StoreActor(ForgeActor):
    """Hosts torchstore's volume and controller."""

    def __init__(self) -> None:
        self._handle = b""

    async def setup(self) -> None:
        from forge_async.backends.torchstore_store import start_store

        self._handle = await start_store()

    @concurrent_endpoint
    async def handle(self) -> bytes:
        """What a `TorchstoreStore` is made from, in any process of the run."""
        return self._handle
