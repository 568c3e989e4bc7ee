"""Segments that clients of any host write and read by Monarch's one-sided RDMA (`weights.transport=rdma`).

The store registers a segment once, when it is made, and drops the registration when it destroys it: to register pins
pages, so it is not for every version. Its clients move bytes between segments and memory of their own, which is used
again for other versions, so that Monarch finds it registered. Who holds what is the store's `SegmentPool`'s matter: a
client holds a segment for as long as one transfer may take, and what it holds longer is taken from it.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import monarch
import torch
from monarch.rdma import RDMAAction, RDMABuffer, RDMATcpFallbackWarning, is_ibverbs_available

from forge_async.backends.segment_memory import MemfdMemory
from forge_async.backends.torchstore_store import INLINE_BYTES, SegmentBuffer, SegmentStore, StoreAddress
from forge_async.core.errors import ConfigError, StallError
from forge_async.weights.segments import Segment
from forge_async.weights.transports import RDMA
from forge_async.weights.warm_memory import WarmMemory


def use_backend(name: str) -> None:
    """Have this process's RDMA go over `weights.rdma_backend`, and over nothing slower.

    Raises ConfigError where there is no hardware for it.
    """
    if name == "tcp":
        monarch.configure(rdma_allow_tcp_fallback=True, rdma_disable_ibverbs=True)
        warnings.filterwarnings("ignore", category=RDMATcpFallbackWarning)  # it was asked for by name
        return
    monarch.configure(rdma_allow_tcp_fallback=False, rdma_disable_ibverbs=False)
    if not is_ibverbs_available():
        raise ConfigError(
            f"weights.rdma_backend=ibverbs needs RDMA hardware on every host, and {socket.gethostname()} shows none; "
            "use weights.transport=rpc, or weights.rdma_backend=tcp to try it without."
        )


class RegisteredMemory(MemfdMemory):
    """Anonymous files of this process, each registered as long as it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: dict[int, RDMABuffer] = {}

    def create(self, number: int, num_bytes: int) -> Segment:
        segment = super().create(number, num_bytes)
        buffer = self._buffers[number] = RDMABuffer(self.tensor(segment))
        return dataclasses.replace(segment, address=buffer)

    def destroy(self, segment: Segment) -> None:
        self._buffers.pop(segment.id).drop()
        super().destroy(segment)


class RdmaStore(SegmentStore):
    """A client on any host."""

    transport = RDMA

    def __init__(self, address: StoreAddress, timeout_s: float = 120.0) -> None:
        super().__init__(address, timeout_s, hold_s=timeout_s)
        self._memory = WarmMemory()
        """To read into."""
        self._lent: dict[int, torch.Tensor] = {}
        """To be filled and put, by address."""
        self._put_last: torch.Tensor | None = None
        self._spare: dict[int, torch.Tensor] = {}
        """What was put before that and may be filled again, by its size."""

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        if num_bytes < INLINE_BYTES:
            return await super().reserve(num_bytes)
        spare = self._spare.pop(num_bytes, None)
        memory = torch.empty(num_bytes, dtype=torch.uint8) if spare is None else spare
        self._lent[memory.data_ptr()] = memory
        return memory

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        begun_s = time.monotonic()
        async with self._leasing(keys) as answer:
            values = await self._fetched(answer.buffers)
        if time.monotonic() - begun_s > self._hold_s:  # the leases may have ended before the last byte was read
            raise StallError(f"To read {keys[0]} took longer than weights.timeout_s={self._timeout_s:g}; give more.")
        yield values

    async def _filled(self, value: torch.Tensor) -> Segment:
        own = self._lent.pop(value.data_ptr(), None)
        segment, _ = await self._reserved(value.numel())
        await self._submit(RDMAAction().write_remote(segment.address, value))
        if own is not None:
            older, self._put_last = self._put_last, own
            self._spare = {} if older is None else {older.numel(): older}
        return segment

    async def _fetched(self, buffers: Sequence[Any]) -> list[Any]:
        """The values, those in segments read in one go into one piece of memory: each segment whole, as it must be."""
        lent = [each for each in buffers if isinstance(each, SegmentBuffer)]
        if not lent:
            return await self._values(buffers)
        warm = self._memory.lend(sum(each.segment.num_bytes for each in lent))
        sizes = [each.segment.num_bytes for each in lent]
        action = RDMAAction()
        for each, place in zip(lent, warm.below.split(sizes), strict=True):
            action.read_remote(place, each.segment.address)
        try:
            await self._submit(action)
        except BaseException:
            warm.discard()  # what was begun may still arrive
            raise
        arrived = iter(warm.tensor.split(sizes))
        others = iter(await self._values([each for each in buffers if not isinstance(each, SegmentBuffer)]))
        return [
            next(arrived)[: each.num_bytes] if isinstance(each, SegmentBuffer) else next(others) for each in buffers
        ]

    async def _submit(self, action: RDMAAction) -> None:
        await self._call(action.submit(timeout=math.ceil(self._timeout_s)))
