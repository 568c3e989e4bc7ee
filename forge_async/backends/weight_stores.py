"""From `weights.transport` to a store, and to its clients in other processes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from forge_async.core.errors import ConfigError
from forge_async.weights.chains import DeltaWriter
from forge_async.weights.plane import WeightPlane
from forge_async.weights.ports import WeightStore
from forge_async.weights.settings import WeightsSettings
from forge_async.weights.transports import SHM, choose


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
        return path, lambda: shutil.rmtree(path, ignore_errors=True)
    if settings.transport == "http":
        from forge_async.backends.http_store import HttpServer

        server = HttpServer(settings.http_host)
        return server.address, server.close
    from forge_async.backends.torchstore_store import start_volume

    return await start_volume(), lambda: None


def open_store(handle: bytes) -> WeightStore:
    """A client of the store, over the transport that suits this process; one a process."""
    opened: _Handle = cloudpickle.loads(handle)
    address, timeout_s = opened.address, opened.settings.timeout_s
    if opened.settings.transport == "filesystem":
        from forge_async.backends.filesystem_store import FilesystemStore

        return FilesystemStore(address)
    if opened.settings.transport == "http":
        from forge_async.backends.http_store import HttpStore

        return HttpStore(address, timeout_s)
    from forge_async.backends.torchstore_store import ShmStore, TorchstoreStore

    transport = choose(opened.settings.transport, same_host=address.process.is_local)
    return (ShmStore if transport == SHM else TorchstoreStore)(address, timeout_s)


def open_plane(handle: bytes) -> WeightPlane:
    """The weight plane over a client of the store, to read from."""
    opened: _Handle = cloudpickle.loads(handle)
    return WeightPlane(open_store(handle), checksums=opened.settings.verify != "none")


def open_writing_plane(handle: bytes) -> WeightPlane:
    """The weight plane over a client of the store, to publish to: with deltas where `weights.delta` has them."""
    settings: WeightsSettings = cloudpickle.loads(handle).settings
    store = open_store(handle)
    makes = settings.makes_deltas(is_shared=store.transport.is_shared)
    deltas = DeltaWriter(settings.anchor_every) if makes else None
    return WeightPlane(store, checksums=settings.verify != "none", deltas=deltas)
