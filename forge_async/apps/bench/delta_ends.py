"""The two ends between which `bench deltas` moves a model of which little changes. Loads torch: actors only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from forge_async.actors.forge_actor import ForgeActor, endpoint
from forge_async.core.errors import ForgeError
from forge_async.core.versions import PolicyVersion

if TYPE_CHECKING:
    from forge_async.weights.packing import LocalShard

NUM_TENSORS = 100


class DeltaEnd(ForgeActor):
    """A process with a bfloat16 model that both ends can work out: the writer's changes with each version."""

    @endpoint
    async def join(self, handle: bytes, num_bytes: int, rate: float) -> None:
        """Begin anew, with a store and a model of so many bytes of which a share `rate` changes with each version."""
        import torch

        from forge_async.backends.weight_stores import open_writing_plane
        from forge_async.weights.packing import Packer, Unpacker

        torch.set_num_threads(1)
        self._plane, self._rate, self._packer = open_writing_plane(handle), rate, Packer(0)
        self._unpacker = Unpacker(shared=self._plane.store.transport.is_shared)
        generator = torch.Generator().manual_seed(0)
        self._model = [
            torch.randn(num_bytes // 2 // NUM_TENSORS, generator=generator).bfloat16() for _ in range(NUM_TENSORS)
        ]
        self._served = [torch.zeros_like(tensor) for tensor in self._model]

    @endpoint
    async def publish(self, step: int) -> dict[str, float]:
        """Change the model, and publish it."""
        self._change(step)
        version = PolicyVersion(step=step)
        memory = await self._plane.memory(self._packer.blob_bytes) if self._packer.blob_bytes else None
        begun, cpu = time.perf_counter(), time.process_time()
        manifest = await self._plane.publish(version, *self._packer.pack(self._shards(), memory))
        took = {"publish_s": time.perf_counter() - begun, "publish_cpu_s": time.process_time() - cpu}
        await self._plane.retire_all_but(2)
        return took | {"bytes": manifest.num_bytes, "stored_bytes": manifest.stored_bytes}

    @endpoint
    async def pull(self, step: int) -> dict[str, float]:
        """Pull a version into this end's own parameters, and compare them with what the model then is."""
        import torch

        begun, cpu = time.perf_counter(), time.process_time()
        async with self._plane.reading(PolicyVersion(step=step)) as (manifest, blobs):
            weights = self._unpacker.unpack(manifest, blobs)
            torch._foreach_copy_(self._served, [weights[str(number)] for number in range(NUM_TENSORS)])
        took = {"pull_s": time.perf_counter() - begun, "pull_cpu_s": time.process_time() - cpu}
        self._change(step)
        for number, (served, tensor) in enumerate(zip(self._served, self._model, strict=True)):
            if not torch.equal(served, tensor):
                raise ForgeError(f"Tensor {number} of version {step} did not arrive as it was published.")
        return took

    def _change(self, step: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(step + 1)
        for tensor in self._model:
            moved = torch.rand(tensor.shape, generator=generator) < self._rate
            tensor.view(torch.int16)[moved] ^= 1

    def _shards(self) -> list[LocalShard]:
        from forge_async.weights.packing import LocalShard

        return [
            LocalShard(name=str(number), tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,))
            for number, tensor in enumerate(self._model)
        ]
