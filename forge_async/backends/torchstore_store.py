"""torchstore 0.1.2 behind the weight plane's port, with shared memory on one host and messages elsewhere.

A volume and its buffers are torchstore's own, extended where it lets them be: `TransportBuffer` says how a tensor
travels, `StorageVolume` gets memory segments, and endpoints for many keys at once (a call costs a millisecond). There
is one volume, so its keys are asked of it and not of torchstore's controller: one call instead of three.

Segments are anonymous files (memfd) of the store's process, which clients of the same host open through /proc. They
have no name that could be left behind: the kernel frees them when the store and all who map them are gone, killed or
not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import mmap
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forge_async.actors.liveness import Process, Watch
from forge_async.core.clock import within
from forge_async.core.packages import require
from forge_async.weights.segments import Segment, SegmentPool
from forge_async.weights.transports import RPC, SHM, Transport

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", str(10 * 2**30))
require("torchstore", feature="the weight store")

from monarch.actor import endpoint, this_proc  # noqa: E402
from torchstore.storage_volume import StorageVolume  # noqa: E402
from torchstore.strategy import SingletonStrategy  # noqa: E402
from torchstore.transport.buffers import MonarchTransportBuffer, TransportBuffer  # noqa: E402
from torchstore.transport.pipe import Request  # noqa: E402

T = TypeVar("T")

INLINE_BYTES = 32 << 10
"""Below this a blob travels inside the message even on one host: a segment costs two more calls."""


class Mappings:
    """Segments as this process has them mapped. Mapping costs a fault a page, so it lasts as long as the segment."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, bool], torch.Tensor] = {}

    def tensor(self, segment: Segment, *, writable: bool = False) -> torch.Tensor:
        """The segment's memory, uint8. What is not writable ends the process that writes to it."""
        key = (segment.id, writable)
        if key not in self._tensors:
            self._tensors[key] = _mapped(segment, writable)
        return self._tensors[key]

    def keep(self, live: frozenset[int]) -> None:
        """Let go of segments that are not among these ids."""
        for key in [key for key in self._tensors if key[0] not in live]:
            del self._tensors[key]


def _mapped(segment: Segment, writable: bool) -> torch.Tensor:
    descriptor = os.open(segment.path, os.O_RDWR if writable else os.O_RDONLY)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    populate = getattr(mmap, "MAP_POPULATE", 0)
    try:
        memory = mmap.mmap(descriptor, segment.num_bytes, flags=mmap.MAP_SHARED | populate, prot=protection)
    finally:
        os.close(descriptor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def create_segment(number: int, num_bytes: int) -> tuple[Segment, int]:
    """A new segment of this process and its descriptor, its pages allocated."""
    descriptor = os.memfd_create(f"forge_async-weights-{number}", os.MFD_CLOEXEC)
    os.posix_fallocate(descriptor, 0, num_bytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    return Segment(id=number, num_bytes=num_bytes, path=path), descriptor


class SegmentBuffer(TransportBuffer):
    """A tensor that stays where it is: only the segment's address travels."""

    finalize = True

    def __init__(self, segment: Segment, num_bytes: int) -> None:
        self.segment, self.num_bytes = segment, num_bytes

    def allocate(self, tensor_like: Any) -> None:
        """Nothing: the segment is there."""

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes, as a view of the segment, or copied into `tensor`."""
        held = _mappings().tensor(self.segment)[: self.num_bytes]
        return held if tensor is None else tensor.copy_(held)


@functools.cache
def _mappings() -> Mappings:
    """This process's own."""
    return Mappings()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the volume says to a reader."""

    buffers: list[TransportBuffer]
    live: frozenset[int]
    missing: str | None = None


class Volume(StorageVolume):
    """torchstore's volume, with many keys a call, and segments that clients of this host map."""

    def __init__(self) -> None:
        super().__init__(SingletonStrategy.get_volume_id)
        self._numbers = itertools.count()
        self._descriptors: dict[int, int] = {}
        self._pool = SegmentPool(self._create, self._destroy, Process.is_running)
        self._sizes: dict[str, int] = {}

    @endpoint
    async def reserve(self, num_bytes: int, writer: Process) -> tuple[Segment, frozenset[int]]:
        """A segment for `writer` to fill, and the ids of all segments."""
        segment = await asyncio.to_thread(self._pool.reserve, num_bytes, writer)
        return segment, self._pool.live

    @endpoint
    async def put_many(self, items: Sequence[tuple[str, TransportBuffer, Request]]) -> None:
        """Store values in their order."""
        for key, buffer, request in items:
            if isinstance(buffer, SegmentBuffer):
                self._pool.bind(buffer.segment.id, key)
                self._sizes[key] = buffer.num_bytes
            else:
                self._pool.unbind(key)
                self._sizes.pop(key, None)
            await self.store.put(key, buffer, request)

    @endpoint
    async def get_many(self, keys: Sequence[str], reader: Process | None) -> _Answer:
        """What is stored. A reader of this host names itself and leases the segments; others get the bytes."""
        stored: Any = self.store
        missing = next((key for key in keys if key not in stored.kv), None)
        if missing is not None:
            return _Answer(buffers=[], live=self._pool.live, missing=missing)
        buffers = [await self.store.get(key, self._buffer(key, reader), Request()) for key in keys]
        return _Answer(buffers=buffers, live=self._pool.live)

    @endpoint
    async def release(self, segment_ids: Sequence[int], reader: Process) -> None:
        """A reader has ended with these segments."""
        for segment_id in segment_ids:
            self._pool.release(segment_id, reader)

    @endpoint
    async def delete_prefix(self, prefix: str) -> None:
        """Forget all keys that begin so, at once."""
        stored: Any = self.store
        for key in [key for key in stored.kv if key.startswith(prefix)]:
            await self.store.delete(key)
            self._sizes.pop(key, None)
            self._pool.unbind(key)

    @endpoint
    async def list_keys(self) -> list[str]:
        """All keys."""
        stored: Any = self.store
        return list(stored.kv)

    @endpoint
    async def held_bytes(self) -> int:
        """Memory of all segments."""
        return self._pool.num_bytes

    def _buffer(self, key: str, reader: Process | None) -> TransportBuffer:
        if reader is None or key not in self._sizes:
            return MonarchTransportBuffer()
        return _Lent(self._pool.lease(key, reader), self._sizes[key])

    def _create(self, num_bytes: int) -> Segment:
        segment, self._descriptors[segment.id] = create_segment(next(self._numbers), num_bytes)
        return segment

    def _destroy(self, segment: Segment) -> None:
        os.close(self._descriptors.pop(segment.id))
        _mappings().keep(frozenset(self._descriptors))


class _Lent(SegmentBuffer):
    """A leased segment on its way to a reader: what the volume would write into it is there already."""

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is."""

    volume: Any
    """Monarch's handle of the volume."""
    process: Process


async def start_volume() -> StoreAddress:
    """Spawn the volume in the calling actor's process."""
    volume = this_proc().spawn("torchstore_volume", Volume)
    await volume.get_id.call_one()
    return StoreAddress(volume=volume, process=Process.current())


class TorchstoreStore:
    """A client of the volume whose tensors travel inside messages; works on any host."""

    transport: Transport = RPC

    def __init__(self, address: StoreAddress, timeout_s: float = 120.0) -> None:
        """`timeout_s` limits each call. The death of a store on this host is noticed at once."""
        self._volume, self._timeout_s = address.volume, timeout_s
        self._watch = Watch("store", (address.process,)) if address.process.is_local else None

    @property
    def carried_by(self) -> str:
        return self.transport.name

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    async def put(self, items: Mapping[str, Any]) -> None:
        prepared = [(key, *(await self._prepared(value))) for key, value in items.items()]
        await self._call(self._volume.put_many.call_one(prepared))

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        yield await self._values((await self._get(keys, None)).buffers)

    async def delete(self, prefix: str) -> None:
        await self._call(self._volume.delete_prefix.call_one(prefix))

    async def keys(self) -> list[str]:
        return await self._call(self._volume.list_keys.call_one())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()

    async def _prepared(self, value: Any) -> tuple[TransportBuffer, Request]:
        buffer, request = MonarchTransportBuffer(), Request.from_any(value)
        await buffer.write_from(request.tensor_val)
        return buffer, request.meta_only()

    async def _get(self, keys: Sequence[str], reader: Process | None) -> _Answer:
        answer = await self._call(self._volume.get_many.call_one(list(keys), reader))
        if answer.missing is not None:
            raise KeyError(answer.missing)
        return answer

    async def _values(self, buffers: Sequence[TransportBuffer]) -> list[Any]:
        return [each.objects if each.is_object else await each.read_into(None) for each in buffers]

    async def _call(self, call: Awaitable[T]) -> T:
        guarded = call if self._watch is None else self._watch.guard(call)
        return await within(guarded, self._timeout_s, who="The weights", waits_for="an answer", from_whom="the store")


class ShmStore(TorchstoreStore):
    """A client on the store's host: tensors are written and read in segments that both processes have mapped."""

    transport = SHM

    def __init__(self, address: StoreAddress, timeout_s: float = 120.0) -> None:
        super().__init__(address, timeout_s)
        self._mappings = Mappings()
        self._own = dataclasses.replace(Process.current(), rank=0)
        self._reserved: dict[int, Segment] = {}

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        if num_bytes < INLINE_BYTES:
            return await super().reserve(num_bytes)
        segment, live = await self._call(self._volume.reserve.call_one(num_bytes, self._own))
        self._mappings.keep(live)
        whole = await asyncio.to_thread(self._mappings.tensor, segment, writable=True)
        self._reserved[whole.data_ptr()] = segment
        return whole[:num_bytes]

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        answer = await self._get(keys, self._own)
        leased = [each.segment for each in answer.buffers if isinstance(each, SegmentBuffer)]
        try:
            self._mappings.keep(answer.live)
            yield await self._values(answer.buffers)
        finally:
            if leased:  # nobody waits for it; if it fails, the store is dead and has no leases
                self._volume.release.broadcast([each.id for each in leased], self._own)

    async def _prepared(self, value: Any) -> tuple[TransportBuffer, Request]:
        if not isinstance(value, torch.Tensor) or value.numel() < INLINE_BYTES:
            return await super()._prepared(value)
        if value.data_ptr() not in self._reserved:
            own = await self.reserve(value.numel())
            value = await asyncio.to_thread(own.copy_, value)
        segment = self._reserved.pop(value.data_ptr())
        return SegmentBuffer(segment, value.numel()), Request()

    async def close(self) -> None:
        await super().close()
        self._mappings.keep(frozenset())

    async def _values(self, buffers: Sequence[TransportBuffer]) -> list[Any]:
        return [
            (await asyncio.to_thread(self._mappings.tensor, each.segment))[: each.num_bytes]
            if isinstance(each, SegmentBuffer)
            else each.objects if each.is_object else await each.read_into(None)
            for each in buffers
        ]  # fmt: skip

    async def held_bytes(self) -> int:
        """Memory of all segments of the store."""
        return await self._call(self._volume.held_bytes.call_one())
