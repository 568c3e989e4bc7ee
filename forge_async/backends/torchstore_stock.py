"""torchstore 0.1.2 as it comes, on Monarch 0.7: what `bench weights` compares with. Not used by runs.

torchstore's own `initialize` spawns its controller in whatever process first asks for it by name, and mixes synchronous
with asynchronous endpoints, which Monarch 0.7 refuses. Here both its actors are spawned explicitly in the calling
actor's process, from an all-asynchronous subclass, and clients are given handles instead of a global name.
"""

from __future__ import annotations

import cloudpickle

from forge_async.backends import torchstore_store as _  # noqa: F401  prepares torchstore's environment

# isort: split
from monarch.actor import endpoint, this_proc
from torchstore.client import LocalClient
from torchstore.controller import Controller, StorageInfo
from torchstore.storage_volume import StorageVolume
from torchstore.strategy import SingletonStrategy, TorchStoreStrategy
from torchstore.transport.pipe import Request


class AsyncController(Controller):
    """torchstore's controller with its synchronous endpoints made asynchronous."""

    @endpoint
    async def get_controller_strategy(self) -> TorchStoreStrategy:
        return Controller.get_controller_strategy._method(self)  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def locate_volumes(self, key: str) -> dict[str, StorageInfo]:
        return Controller.locate_volumes._method(self, key)  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def notify_put(self, key: str, request: Request, storage_volume_id: str) -> None:
        Controller.notify_put._method(self, key, request, storage_volume_id)  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def keys(self, prefix: str | None = None) -> list[str]:
        return list(Controller.keys._method(self, prefix))  # pyright: ignore[reportAttributeAccessIssue]

    @endpoint
    async def notify_delete(self, key: str, storage_volume_id: str) -> None:
        Controller.notify_delete._method(self, key, storage_volume_id)  # pyright: ignore[reportAttributeAccessIssue]


async def start_stock() -> bytes:
    """Spawn torchstore's volume and controller in the calling actor's process; returns what `open_stock` needs."""
    proc = this_proc()
    volume = proc.spawn("stock_volume", StorageVolume, SingletonStrategy.get_volume_id)
    controller = proc.spawn("stock_controller", AsyncController)
    await controller.init.call(strategy=SingletonStrategy(), num_storage_volumes=1, storage_volumes=volume)
    strategy = await controller.get_controller_strategy.call_one()
    return cloudpickle.dumps((controller, strategy))


def open_stock(handle: bytes) -> LocalClient:
    """torchstore's client."""
    return LocalClient(*cloudpickle.loads(handle))
