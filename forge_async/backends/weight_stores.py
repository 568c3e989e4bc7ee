"""From `weights.transport` to a store, and to its clients in other processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cloudpickle

from forge_async.weights.plane import WeightPlane
from forge_async.weights.ports import WeightStore
from forge_async.weights.settings import WeightsSettings
from forge_async.weights.transports import SHM, choose


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handle:
    settings: WeightsSettings
    address: Any


async def start_store(settings: WeightsSettings) -> bytes:
    """Start the store in the calling actor's process; returns what `open_store` needs, in any process of the run."""
    from forge_async.backends.torchstore_store import start_volume

    return cloudpickle.dumps(_Handle(settings=settings, address=await start_volume()))


def open_store(handle: bytes) -> WeightStore:
    """A client of the store, over the transport that suits this process; one a process."""
    from forge_async.backends.torchstore_store import ShmStore, TorchstoreStore

    opened: _Handle = cloudpickle.loads(handle)
    transport = choose(opened.settings.transport, same_host=opened.address.process.is_local)
    kind = ShmStore if transport == SHM else TorchstoreStore
    return kind(opened.address, opened.settings.timeout_s)


def open_plane(handle: bytes) -> WeightPlane:
    """The weight plane over a client of the store."""
    opened: _Handle = cloudpickle.loads(handle)
    return WeightPlane(open_store(handle), checksums=opened.settings.verify != "none")
