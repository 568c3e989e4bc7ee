"""The two ends between which `bench weights` moves a model, and the ways of moving it. Loads torch: actors only."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_async.actors.forge_actor import ForgeActor, endpoint
from forge_async.core.errors import ForgeError
from forge_async.core.versions import PolicyVersion

if TYPE_CHECKING:
    import torch

    from forge_async.weights.plane import WeightPlane

BUCKET_BYTES = 32 << 20
Model = dict[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One publication or pull, as one end saw it."""

    wall_s: float
    cpu_s: float
    """Of this end's process; a store's are not in it."""
    pause_s: float
    """The part of a pull in which a replica could not generate: the copy into its own parameters."""
    value: int
    """What every element of the version is."""


class Carrier(Protocol):
    """A way of moving a model from one process to another."""

    async def publish(self, version: int) -> None: ...
    async def pull(self, version: int) -> float:
        """Returns the seconds of the last copy."""
        ...


class End(ForgeActor):
    """A process with a model: the writer's changes with each version, the reader's follows."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._model: Model = {}
        self._carriers: dict[str, Carrier] = {}
        self._value = 0

    @endpoint
    async def load(self, num_tensors: int, num_bytes: int) -> None:
        """Make a model, and forget the last one with the ways of moving it."""
        import torch

        torch.set_num_threads(1)
        self._carriers.clear()
        self._value = 0
        num_elements = max(1, num_bytes // num_tensors // 4)
        self._model = {f"layers.{i}.weight": torch.zeros(num_elements) for i in range(num_tensors)}

    @endpoint
    async def stock(self) -> bytes:
        """Start torchstore as it comes in this process."""
        from forge_async.backends.torchstore_stock import start_stock

        return await start_stock()

    @endpoint
    async def join(self, case: str, argument: Any, num_tensors: int) -> None:
        """Get ready to move the first `num_tensors` tensors in the way of a case.

        `argument`: a store's handle, a rank, a folder, or nothing.
        """
        model = dict(list(self._model.items())[:num_tensors])
        self._carriers[case] = CARRIERS[case.partition("/")[0]](model, argument, self._folder)

    @endpoint
    async def leave(self, case: str, version: int) -> None:
        """Let go of a way of moving the model, whose last version was `version`, and of what it keeps."""
        carrier = self._carriers.pop(case)
        if isinstance(carrier, PlaneCarrier):
            await carrier.close(version)

    @endpoint
    async def publish(self, case: str, version: int) -> Timing:
        """Make a new version, in which every element is one more, then measure how long it takes to publish it."""
        import torch

        torch._foreach_add_(list(self._model.values()), 1.0)
        self._value += 1
        carrier = self._carriers[case]
        if isinstance(carrier, PlaneCarrier):
            await carrier.prepare(version)
        begun, cpu = time.perf_counter(), time.process_time()
        await carrier.publish(version)
        return Timing(
            wall_s=time.perf_counter() - begun, cpu_s=time.process_time() - cpu, pause_s=0.0, value=self._value
        )

    @endpoint
    async def pull(self, case: str, version: int, num_tensors: int, value: int) -> Timing:
        """Measure a pull, then look at about a hundred of its tensors for the value that was published."""
        begun, cpu = time.perf_counter(), time.process_time()
        pause_s = await self._carriers[case].pull(version)
        timing = Timing(
            wall_s=time.perf_counter() - begun, cpu_s=time.process_time() - cpu, pause_s=pause_s, value=value
        )
        if isinstance(self._carriers[case], MemcpyCarrier):
            return timing
        for name, tensor in list(self._model.items())[: num_tensors : max(1, num_tensors // 100)]:
            if tensor[0] != value or tensor[-1] != value:
                raise ForgeError(f"{case}: {name} did not arrive: it is {tensor[0]:g} and should be {value}.")
        return timing


def _copy_into(model: Model, weights: Model) -> float:
    """The one copy that no way can save: into the memory that an engine computes with."""
    import torch

    begun = time.perf_counter()
    torch._foreach_copy_(list(model.values()), [weights[name] for name in model])
    return time.perf_counter() - begun


class PlaneCarrier:
    """The weight plane, over whatever transport the store's handle names."""

    def __init__(self, model: Model, argument: bytes, folder: Path) -> None:
        from forge_async.backends.weight_stores import open_plane
        from forge_async.weights.packing import LocalShard, Packer, Unpacker

        self._plane: WeightPlane = open_plane(argument)
        self._model, self._packer = model, Packer(0)
        self._blob: torch.Tensor | None = None
        self._unpacker = Unpacker(shared=self._plane.store.transport.is_shared)
        self._shards = [
            LocalShard(name=name, tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,))
            for name, tensor in model.items()
        ]

    async def prepare(self, version: int) -> None:
        store = self._plane.store
        await self._plane.retire(PolicyVersion(step=version - 2))
        lends = store.transport.lends_memory and self._packer.blob_bytes
        self._blob = await store.reserve(self._packer.blob_bytes) if lends else None

    async def close(self, version: int) -> None:
        """Have the store forget the last versions, and this process its client."""
        for each in (version, version - 1):
            await self._plane.retire(PolicyVersion(step=each))
        await self._plane.store.close()

    async def publish(self, version: int) -> None:
        await self._plane.publish(PolicyVersion(step=version), *self._packer.pack(self._shards, self._blob))

    async def pull(self, version: int) -> float:
        async with self._plane.reading(PolicyVersion(step=version)) as (manifest, blobs):
            return _copy_into(self._model, self._unpacker.unpack(manifest, blobs))


class StockCarrier:
    """torchstore's own client, a key a tensor."""

    def __init__(self, model: Model, handle: bytes, folder: Path) -> None:
        from forge_async.backends.torchstore_stock import open_stock

        self._model, self._client = model, open_stock(handle)

    async def publish(self, version: int) -> None:
        for name, tensor in self._model.items():
            await self._client.put(f"{version}/{name}", tensor)

    async def pull(self, version: int) -> float:
        weights: Any = {name: await self._client.get(f"{version}/{name}") for name in self._model}
        pause_s = _copy_into(self._model, weights)
        for name in self._model:  # as a new version each time needs, or memory would grow
            await self._client.delete(f"{version}/{name}")
        return pause_s


class GlooCarrier:
    """torch.distributed's broadcast over gloo, a tensor at a time or in buckets; both ends take part at once."""

    bucket_bytes = 0

    def __init__(self, model: Model, rank: int, folder: Path) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(str(folder / "gloo"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        self._model, self._buckets = model, _buckets(model, self.bucket_bytes)

    async def publish(self, version: int) -> None:
        await asyncio.to_thread(self._send)

    async def pull(self, version: int) -> float:
        return await asyncio.to_thread(self._receive)

    def _send(self) -> None:
        import torch
        import torch.distributed as dist

        for memory, views, tensors in self._buckets:
            torch._foreach_copy_(views, tensors)
            dist.broadcast(memory, 0)

    def _receive(self) -> float:
        import torch
        import torch.distributed as dist

        for memory, _, _ in self._buckets:
            dist.broadcast(memory, 0)
        begun = time.perf_counter()
        for _, views, tensors in self._buckets:
            torch._foreach_copy_(tensors, views)
        return time.perf_counter() - begun


class GlooBucketsCarrier(GlooCarrier):
    """In buckets."""

    bucket_bytes = BUCKET_BYTES


def _buckets(model: Model, bucket_bytes: int) -> list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]]:
    """(flat memory, its views, the tensors they stand for), each of at least one tensor and at most so many bytes."""
    import torch

    groups: list[list[torch.Tensor]] = []
    for tensor in model.values():
        if not groups or sum(each.nbytes for each in groups[-1]) + tensor.nbytes > bucket_bytes:
            groups.append([])
        groups[-1].append(tensor)
    buckets = []
    for tensors in groups:
        memory = torch.zeros(sum(tensor.numel() for tensor in tensors))
        buckets.append((memory, list(memory.split([tensor.numel() for tensor in tensors])), tensors))
    return buckets


class SafetensorsCarrier:
    """A safetensors file a version, moved into place when it is whole."""

    def __init__(self, model: Model, argument: str, folder: Path) -> None:
        self._model, self._folder = model, Path(argument)

    async def publish(self, version: int) -> None:
        from safetensors.torch import save_file

        partial = self._folder / "partial"
        save_file(self._model, partial)
        partial.replace(self._folder / f"{version}.safetensors")

    async def pull(self, version: int) -> float:
        from safetensors.torch import load_file

        path = self._folder / f"{version}.safetensors"
        pause_s = _copy_into(self._model, load_file(path))
        path.unlink()
        return pause_s


class MemcpyCarrier:
    """No way at all: each end copies its own model once, into memory that it has used before."""

    def __init__(self, model: Model, argument: None, folder: Path) -> None:
        import torch

        self._tensors, self._sizes = list(model.values()), [tensor.numel() for tensor in model.values()]
        self._memory = torch.ones(sum(self._sizes))
        self._views = list(self._memory.split(self._sizes))

    async def publish(self, version: int) -> None:
        self._copy()

    async def pull(self, version: int) -> float:
        self._copy()
        return 0.0

    def _copy(self) -> None:
        import torch

        torch._foreach_copy_(self._views, self._tensors)


class FreshMemcpyCarrier(MemcpyCarrier):
    """The same into fresh memory, which the system first has to find and clear."""

    def _copy(self) -> None:
        import torch

        torch._foreach_copy_(list(torch.empty_like(self._memory).split(self._sizes)), self._tensors)


CARRIERS: dict[str, Callable[[Model, Any, Path], Carrier]] = {
    "auto": PlaneCarrier,
    "shm": PlaneCarrier,
    "rpc": PlaneCarrier,
    "filesystem": PlaneCarrier,
    "http": PlaneCarrier,
    "broadcast": PlaneCarrier,
    "rdma": PlaneCarrier,
    "torchstore_stock": StockCarrier,
    "gloo_per_parameter": GlooCarrier,
    "gloo_buckets": GlooBucketsCarrier,
    "safetensors_shm": SafetensorsCarrier,
    "safetensors_disk": SafetensorsCarrier,
    "memcpy_warm": MemcpyCarrier,
    "memcpy_fresh": FreshMemcpyCarrier,
}
"""First part of a case's name -> its carrier."""
