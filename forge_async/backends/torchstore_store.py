"""torchstore 0.1.2 behind the weight plane's port, with memory segments that clients reach, and messages elsewhere.

A volume and its buffers are torchstore's own, extended where it lets them be: `TransportBuffer` says how a tensor
travels, `StorageVolume` gets memory segments, and endpoints for many keys at once (a call costs a millisecond). There
is one volume, so its keys are asked of it and not of torchstore's controller: one call instead of three.

What segments are made of is a `Memory`. Clients of the store's host open them (`MappedStore`), those of other hosts
write and read them by RDMA (`rdma_store.py`), or have the bytes sent in messages (`TorchstoreStore`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from forge_async.actors.liveness import Process, Watch
from forge_async.backends.segment_memory import Access, Mappings, Memory
from forge_async.core.clock import within
from forge_async.core.errors import WeightsError
from forge_async.core.packages import require
from forge_async.weights.segments import Segment, SegmentPool
from forge_async.weights.transports import RPC, Transport

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


class SegmentBuffer(TransportBuffer):
    """A tensor in a segment, which stays there: only the segment's address travels."""

    finalize = True

    def __init__(self, segment: Segment, num_bytes: int) -> None:
        self.segment, self.num_bytes = segment, num_bytes
        self.memory: torch.Tensor | None = None
        """The segment's, in the store's process."""

    def allocate(self, tensor_like: Any) -> None:
        """Nothing: the segment is there."""

    async def read_into(self, tensor: torch.Tensor | None = None) -> torch.Tensor:
        """In the store's process: the bytes, as a view of the segment, or copied into `tensor`."""
        assert self.memory is not None, "read where the segment is not"
        held = self.memory[: self.num_bytes]
        return held if tensor is None else tensor.copy_(held)

    async def write_from(self, tensor: torch.Tensor | None) -> None:
        """Nothing: what the store would write is there already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What the volume says to a reader."""

    buffers: list[TransportBuffer]
    live: frozenset[int]
    missing: str | None = None


class Volume(StorageVolume):
    """torchstore's volume, with many keys a call, and segments that clients reach."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(SingletonStrategy.get_volume_id)
        self._memory, numbers = memory, itertools.count()
        self._pool = SegmentPool(
            lambda num_bytes: memory.create(next(numbers), num_bytes), memory.destroy, _may_run, time.monotonic
        )
        self._sizes: dict[str, int] = {}

    @endpoint
    async def reserve(self, num_bytes: int, writer: Process, hold_s: float) -> tuple[Segment, frozenset[int]]:
        """A segment for `writer` to fill within `hold_s`, and the ids of all segments."""
        segment = await asyncio.to_thread(self._pool.reserve, num_bytes, writer, hold_s)
        return segment, self._pool.live

    @endpoint
    async def put_many(
        self, items: Sequence[tuple[str, TransportBuffer, Request]], forget: Sequence[str] = ()
    ) -> str | None:
        """Store values in their order, then forget all keys that begin with one of `forget`. Stops at a key whose
        segment its writer does not hold any more, and names it."""
        for key, buffer, request in items:
            if isinstance(buffer, SegmentBuffer):
                try:
                    self._pool.bind(buffer.segment.id, key)
                except KeyError:
                    return key
                self._sizes[key] = buffer.num_bytes
                buffer.memory = self._memory.tensor(buffer.segment)
            else:
                self._pool.unbind(key)
                self._sizes.pop(key, None)
            await self.store.put(key, buffer, request)
        for prefix in forget:
            await self._forget(prefix)
        return None

    @endpoint
    async def get_many(self, keys: Sequence[str], reader: Process | None, hold_s: float) -> _Answer:
        """What is stored. A reader that reaches segments names itself and leases them; others get the bytes."""
        stored: Any = self.store
        missing = next((key for key in keys if key not in stored.kv), None)
        if missing is not None:
            return _Answer(buffers=[], live=self._pool.live, missing=missing)
        buffers = [await self.store.get(key, self._buffer(key, reader, hold_s), Request()) for key in keys]
        return _Answer(buffers=buffers, live=self._pool.live)

    @endpoint
    async def release(self, segment_ids: Sequence[int], reader: Process) -> None:
        """A reader has ended with these segments."""
        for segment_id in segment_ids:
            self._pool.release(segment_id, reader)

    @endpoint
    async def delete_prefix(self, prefix: str) -> None:
        """Forget all keys that begin so, at once."""
        await self._forget(prefix)

    @endpoint
    async def list_keys(self) -> list[str]:
        """All keys."""
        stored: Any = self.store
        return list(stored.kv)

    @endpoint
    async def held_bytes(self) -> int:
        """Memory of all segments."""
        return self._pool.num_bytes

    async def _forget(self, prefix: str) -> None:
        stored: Any = self.store
        for key in [key for key in stored.kv if key.startswith(prefix)]:
            await self.store.delete(key)
            self._sizes.pop(key, None)
            self._pool.unbind(key)

    def _buffer(self, key: str, reader: Process | None, hold_s: float) -> TransportBuffer:
        if reader is None or key not in self._sizes:
            return MonarchTransportBuffer()
        return SegmentBuffer(self._pool.lease(key, reader, hold_s), self._sizes[key])


def _may_run(process: Process) -> bool:
    """Whether a process runs, for all that can be seen from here."""
    return not process.is_local or process.is_running()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the store is."""

    volume: Any
    """Monarch's handle of the volume."""
    process: Process


async def start_volume(memory: Memory) -> StoreAddress:
    """Spawn the volume in the calling actor's process. `memory`: what its segments are made of, none of them yet."""
    volume = this_proc().spawn("torchstore_volume", Volume, memory)
    await volume.get_id.call_one()
    return StoreAddress(volume=volume, process=Process.current())


class TorchstoreStore:
    """A client of the volume whose tensors travel inside messages; works on any host."""

    transport: Transport = RPC

    def __init__(self, address: StoreAddress, timeout_s: float = 120.0) -> None:
        """`timeout_s` limits each call. The death of a store on this host is noticed at once; of one elsewhere whoever
        watches it there tells, by `close`."""
        self._volume, self._timeout_s = address.volume, timeout_s
        self._watch = Watch("store", (address.process,) if address.process.is_local else ())

    @property
    def carried_by(self) -> str:
        return self.transport.name

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        prepared = [(key, *(await self._prepared(value))) for key, value in items.items()]
        lost = await self._call(self._volume.put_many.call_one(prepared, list(forget)))
        if lost is not None:
            raise WeightsError(
                f"{lost} was not stored: to write it took longer than weights.timeout_s={self._timeout_s:g}, and its "
                "memory was taken back; give a longer weights.timeout_s."
            )

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        yield await self._values((await self._get(keys, None)).buffers)

    async def delete(self, prefix: str) -> None:
        await self._call(self._volume.delete_prefix.call_one(prefix))

    async def keys(self) -> list[str]:
        return await self._call(self._volume.list_keys.call_one())

    async def close(self) -> None:
        """Calls under way fail with ActorDiedError, and so do later ones."""
        self._watch.close("this process has left it")

    async def _prepared(self, value: Any) -> tuple[TransportBuffer, Request]:
        buffer, request = MonarchTransportBuffer(), Request.from_any(value)
        await buffer.write_from(request.tensor_val)
        return buffer, request.meta_only()

    async def _get(self, keys: Sequence[str], reader: Process | None, hold_s: float = math.inf) -> _Answer:
        answer = await self._call(self._volume.get_many.call_one(list(keys), reader, hold_s))
        if answer.missing is not None:
            raise KeyError(answer.missing)
        return answer

    async def _values(self, buffers: Sequence[TransportBuffer]) -> list[Any]:
        return [each.objects if each.is_object else await each.read_into(None) for each in buffers]

    async def _call(self, call: Awaitable[T]) -> T:
        return await within(
            self._watch.guard(call), self._timeout_s, who="The weights", waits_for="an answer", from_whom="the store"
        )


class SegmentStore(TorchstoreStore):
    """A client that reaches the store's segments: what is common to all ways of doing so."""

    def __init__(self, address: StoreAddress, timeout_s: float, hold_s: float) -> None:
        """`hold_s`: longest time for which it holds a segment; inf where the store sees whether it still runs."""
        super().__init__(address, timeout_s)
        self._own, self._hold_s = dataclasses.replace(Process.current(), rank=0), hold_s

    async def held_bytes(self) -> int:
        """Memory of all segments of the store."""
        return await self._call(self._volume.held_bytes.call_one())

    async def _prepared(self, value: Any) -> tuple[TransportBuffer, Request]:
        if not isinstance(value, torch.Tensor) or value.numel() < INLINE_BYTES:
            return await super()._prepared(value)
        return SegmentBuffer(await self._filled(value), value.numel()), Request()

    async def _filled(self, value: torch.Tensor) -> Segment:
        """A reserved segment that has these bytes."""
        raise NotImplementedError

    async def _reserved(self, num_bytes: int) -> tuple[Segment, frozenset[int]]:
        return await self._call(self._volume.reserve.call_one(num_bytes, self._own, self._hold_s))

    @asynccontextmanager
    async def _leasing(self, keys: Sequence[str]) -> AsyncIterator[_Answer]:
        """Enter to get what is stored, with leases that last until the exit."""
        answer = await self._get(keys, self._own, self._hold_s)
        leased = [each.segment.id for each in answer.buffers if isinstance(each, SegmentBuffer)]
        try:
            yield answer
        finally:
            if leased:  # nobody waits for it; if it fails, the store is dead and has no leases
                self._volume.release.broadcast(leased, self._own)


class MappedStore(SegmentStore):
    """A client on the store's host: tensors are written and read in segments that both processes have open."""

    def __init__(self, address: StoreAddress, timeout_s: float, transport: Transport, access: Access) -> None:
        super().__init__(address, timeout_s, math.inf)
        self.transport, self._access = transport, access
        self._mappings = Mappings(access.open)
        self._lent: dict[int, Segment] = {}

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        if num_bytes < INLINE_BYTES:
            return await super().reserve(num_bytes)
        segment, live = await self._reserved(num_bytes)
        self._mappings.keep(live)
        whole = await asyncio.to_thread(self._mappings.tensor, segment, writable=True)
        self._lent[whole.data_ptr()] = segment
        return whole[:num_bytes]

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        async with self._leasing(keys) as answer:
            self._mappings.keep(answer.live)
            try:
                yield await self._values(answer.buffers)
            finally:
                self._access.settle()

    async def close(self) -> None:
        await super().close()
        self._mappings.keep(frozenset())

    async def _filled(self, value: torch.Tensor) -> Segment:
        if value.data_ptr() not in self._lent:
            own = await self.reserve(value.numel())
            value = await asyncio.to_thread(own.copy_, value)
        self._access.settle()
        return self._lent.pop(value.data_ptr())

    async def _values(self, buffers: Sequence[TransportBuffer]) -> list[Any]:
        return [
            (await asyncio.to_thread(self._mappings.tensor, each.segment))[: each.num_bytes]
            if isinstance(each, SegmentBuffer)
            else each.objects if each.is_object else await each.read_into(None)
            for each in buffers
        ]  # fmt: skip
