"""From `weights.transport` to a store, and to its clients in other processes."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from forge_async.core.errors import ConfigError
from forge_async.weights.chains import DeltaWriter
from forge_async.weights.plane import WeightPlane
from forge_async.weights.ports import WeightStore
from forge_async.weights.settings import WeightsSettings
from forge_async.weights.transports import IPC, RDMA, SHM, choose

if TYPE_CHECKING:
    from forge_async.backends.broadcast_ends import Sending
    from forge_async.backends.broadcast_group import Meeting
    from forge_async.backends.segment_memory import Memory
    from forge_async.backends.torchstore_store import StoreAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStore:
    """A store, from the process that hosts it."""

    handle: bytes
    """What `open_store` and `open_plane` need, in any process of the run."""
    close: Callable[[], None]
    """Takes away what would outlive the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handle:
    settings: WeightsSettings
    address: Any


async def start_store(settings: WeightsSettings, folder: str = "") -> RunningStore:
    """Start the store of `weights.transport` in the calling actor's process.

    `folder` is where files go, unless `weights.folder` says otherwise.
    """
    address, close = await _start(settings, settings.folder or folder)
    return RunningStore(handle=cloudpickle.dumps(_Handle(settings=settings, address=address)), close=close)


async def _start(settings: WeightsSettings, folder: str) -> tuple[Any, Callable[[], None]]:
    if settings.transport == "filesystem":
        from forge_async.backends.filesystem_store import prepare_folder

        if not folder:
            raise ConfigError("weights.transport=filesystem needs weights.folder: a folder that all hosts share.")
        path = Path(folder).absolute()
        prepare_folder(path)
        # Of its own: what clients of a dead store still write does not get among this one's.
        own = path / uuid.uuid4().hex[:8]
        own.mkdir()
        return own, lambda: shutil.rmtree(path, ignore_errors=True)
    if settings.transport == "http":
        from forge_async.backends.http_store import HttpServer

        server = HttpServer(settings.http_host)
        return server.address, server.close
    from forge_async.backends.torchstore_store import start_volume

    if settings.transport != "broadcast":
        return await start_volume(_memory(settings)), lambda: None
    from forge_async.backends.broadcast_ends import dismiss
    from forge_async.backends.broadcast_group import MeetingPoint

    point = MeetingPoint(settings.broadcast_host)

    def close() -> None:
        dismiss(point.meeting)
        point.close()

    return (await start_volume(_memory(settings)), point.meeting), close


def _memory(settings: WeightsSettings) -> Memory:
    """What the segments of a volume are made of."""
    if settings.transport == "ipc":
        from forge_async.backends.cuda_memory import CudaMemory

        return CudaMemory(settings.ipc_device)
    if settings.transport == "rdma":
        from forge_async.backends.rdma_store import RegisteredMemory, use_backend

        use_backend(settings.rdma_backend)
        return RegisteredMemory()
    from forge_async.backends.segment_memory import MemfdMemory

    return MemfdMemory()


def open_store(handle: bytes, on_sent: Callable[[Sending], None] | None = None) -> WeightStore:
    """A client of the store, over the transport that suits this process; one a process.

    `on_sent` is told of each broadcast that this process has made.
    """
    opened: _Handle = cloudpickle.loads(handle)
    address, timeout_s = opened.address, opened.settings.timeout_s
    if opened.settings.transport == "filesystem":
        from forge_async.backends.filesystem_store import FilesystemStore

        return FilesystemStore(address)
    if opened.settings.transport == "http":
        from forge_async.backends.http_store import HttpStore

        return HttpStore(address, timeout_s)
    if opened.settings.transport == "broadcast":
        return _open_broadcast(opened.settings, address, on_sent)
    return _open_volume(opened.settings, address)


def _open_volume(settings: WeightsSettings, address: StoreAddress) -> WeightStore:
    from forge_async.backends.torchstore_store import MappedStore, TorchstoreStore

    transport, timeout_s = choose(settings.transport, same_host=address.process.is_local), settings.timeout_s
    if transport == RDMA:
        from forge_async.backends.rdma_store import RdmaStore, use_backend

        use_backend(settings.rdma_backend)
        return RdmaStore(address, timeout_s)
    if transport == IPC:
        from forge_async.backends.cuda_memory import CudaAccess

        return MappedStore(address, timeout_s, IPC, CudaAccess())
    if transport == SHM:
        from forge_async.backends.segment_memory import MemfdAccess

        return MappedStore(address, timeout_s, SHM, MemfdAccess())
    return TorchstoreStore(address, timeout_s)


def _open_broadcast(
    settings: WeightsSettings, address: tuple[StoreAddress, Meeting], on_sent: Callable[[Sending], None] | None
) -> WeightStore:
    from forge_async.backends.broadcast_ends import Limits
    from forge_async.backends.broadcast_store import BroadcastStore

    # Half of a pull's time: the other half is for what is read from the store instead.
    limits = Limits(member_s=settings.broadcast_timeout_s, total_s=settings.timeout_s / 2)
    volume, meeting = address
    base, backend = _open_volume(settings, volume), settings.broadcast_backend
    return BroadcastStore(base, meeting, backend=backend, limits=limits, on_sent=on_sent)


def open_plane(handle: bytes, on_sent: Callable[[Sending], None] | None = None) -> WeightPlane:
    """The weight plane over a client of the store, to read from, or to publish to without deltas.

    `on_sent` as in `open_store`.
    """
    opened: _Handle = cloudpickle.loads(handle)
    return WeightPlane(open_store(handle, on_sent), checksums=opened.settings.verify != "none")


def open_writing_plane(handle: bytes, on_sent: Callable[[Sending], None] | None = None) -> WeightPlane:
    """The weight plane over a client of the store, to publish to: with deltas where `weights.delta` has them.

    `on_sent` as in `open_store`.
    """
    settings: WeightsSettings = cloudpickle.loads(handle).settings
    store = open_store(handle, on_sent)
    makes = settings.makes_deltas(is_shared=store.transport.is_shared)
    deltas = DeltaWriter(settings.anchor_every) if makes else None
    return WeightPlane(store, checksums=settings.verify != "none", deltas=deltas)
