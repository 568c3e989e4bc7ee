"""A vLLM engine on two tensor-parallel ranks, for suites that load weights by name into an engine of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any

from forge_async.actors.engine_ranks import OwnRanks
from forge_async.backends.vllm_engine import VllmEngine
from forge_async.backends.weight_stores import open_plane, start_store
from forge_async.core.versions import PolicyVersion
from forge_async.policy.settings import PolicySettings
from forge_async.weights.packing import LocalShard, Packer
from forge_async.weights.settings import WeightsSettings


def halves(weights: Mapping[str, Any]) -> list[list[LocalShard]]:
    """Weights as two FSDP2 ranks of a learner hold them: the rows of each cut in two."""
    return [
        [
            LocalShard(
                name=name,
                tensor=tensor[start : start + tensor.shape[0] // 2] if rank == 0 else tensor[start:],
                global_shape=tuple(tensor.shape),
                offsets=(start, *[0] * (tensor.dim() - 1)),
            )
            for name, tensor in weights.items()
            for start in (rank * (tensor.shape[0] // 2),)
        ]
        for rank in range(2)
    ]


def experts_apart(weights: Mapping[str, Any]) -> list[list[LocalShard]]:
    """Weights as two ranks of a learner hold them that share out whole experts, every other one, and cut the rest."""
    ranks = halves({name: tensor for name, tensor in weights.items() if ".experts." not in name})
    for name, tensor in weights.items():
        if ".experts." in name:
            expert = int(name.partition(".experts.")[2].partition(".")[0])
            shape = tuple(tensor.shape)
            ranks[expert % 2].append(LocalShard(name=name, tensor=tensor, global_shape=shape, offsets=(0, 0)))
    return ranks


class EngineOnRanks:
    """An engine whose `load` publishes what it is given, and has the ranks fetch their slices of it."""

    def __init__(self, folder: str, scratch: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        settings = PolicySettings(
            tensor_parallel=2, max_model_tokens=128, max_sequences=64, max_batch_tokens=1024, kv_cache_bytes=4 << 20
        )
        self._ranks: OwnRanks = self._wait(OwnRanks.start("engine", settings, None, ()))
        self._engine = VllmEngine(folder, settings, PolicyVersion(), ranks=self._ranks)
        handle = self._wait(start_store(WeightsSettings(transport="filesystem"), scratch)).handle
        self._plane = open_plane(handle)
        self._packers = [Packer(rank) for rank in range(2)]
        self._wait(self._ranks.connect(handle))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load(
        self, weights: Mapping[str, Any], version: PolicyVersion, *, keep_kv: bool = True, layout: str = "halves"
    ) -> int:
        """As the port says. `layout`: of the learner, "halves" or "experts_apart"."""
        self._wait(self._publish({"halves": halves, "experts_apart": experts_apart}[layout](weights), version))
        stack = AsyncExitStack()
        try:
            self._wait(stack.enter_async_context(self._ranks.fetched(version, self._plane)))
            return self._engine.load(None, version, keep_kv=keep_kv)
        finally:
            self._wait(stack.aclose())

    def pids(self) -> list[int]:
        """Of the ranks."""
        return self._ranks.handle.pids

    async def _publish(self, shards_of_ranks: list[list[LocalShard]], version: PolicyVersion) -> None:
        for packer, shards in zip(self._packers, shards_of_ranks, strict=True):
            await self._plane.stage(version, *packer.pack(shards))
        await self._plane.commit(version, 2)

    def _wait(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(300)
