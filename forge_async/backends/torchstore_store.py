"""torchstore 0.1.2 behind the weight plane's port.

torchstore's own `initialize` spawns its controller in whatever process first asks for it by name, and mixes synchronous
with asynchronous endpoints, which Monarch 0.7 refuses. Here both its actors are spawned explicitly in the store's
process, from an all-asynchronous subclass, and clients are given handles instead of a global name.
"""

from __future__ import annotations

import os
from typing import Any

import cloudpickle

from forge_async.core.packages import require

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(10 * 2**30))
require("torchstore", feature="the weight store")

from monarch.actor import endpoint, this_proc  # noqa: E402
from torchstore.client import LocalClient  # noqa: E402
from torchstore.controller import Controller, StorageInfo  # noqa: E402
from torchstore.storage_volume import StorageVolume  # noqa: E402
from torchstore.strategy import SingletonStrategy, TorchStoreStrategy  # noqa: E402
from torchstore.transport.pipe import Request  # noqa: E402


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


async def start_store() -> bytes:
    """Spawn torchstore's volume and controller in the calling actor's process.

    Returns an opaque handle to pass to `TorchstoreStore` in any process of the run.
    """
    proc = this_proc()
    volume = proc.spawn("torchstore_volume", StorageVolume, SingletonStrategy.get_volume_id)
    controller = proc.spawn("torchstore_controller", AsyncController)
    await controller.init.call(strategy=SingletonStrategy(), num_storage_volumes=1, storage_volumes=volume)
    strategy = await controller.get_controller_strategy.call_one()
    return cloudpickle.dumps((controller, strategy))


class TorchstoreStore:
    """A client of the store; one a process."""

    def __init__(self, handle: bytes) -> None:
        """`handle` is what `start_store` returned."""
        self._client = LocalClient(*cloudpickle.loads(handle))

    async def put(self, key: str, value: Any) -> None:
        await self._client.put(key, value)

    async def get(self, key: str) -> Any:
        return await self._client.get(key)

    async def delete(self, key: str) -> None:
        if not await self._client.exists(key):
            raise KeyError(key)
        await self._client.delete(key)

    async def keys(self) -> list[str]:
        return await self._client.keys()
