"""One tensor-parallel rank of an engine: vLLM's worker with its shards of the model, in a process of its own.

The engine's core (scheduler, requests, versions) lives in the replica's process and reaches the ranks through the
executor in `vllm_executor.py`. A rank fetches its own slices of a version while the engine steps; `load` only copies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import cloudpickle

from forge_async.backends.vllm_experts import write
from forge_async.backends.vllm_layout import Held, held_boxes
from forge_async.backends.vllm_process import prepare
from forge_async.core.errors import WeightsError
from forge_async.weights.manifest import Layout, Manifest
from forge_async.weights.packing import Transfer
from forge_async.weights.reshard import TransferPlan, Wanted

if TYPE_CHECKING:
    import torch


class VllmRank:
    """Used from one thread, but for `plan_for` and `stage`, which the fetching of a version calls meanwhile."""

    def __init__(self, rank: int, num_ranks: int, *, compiles: bool, threads: int = 1) -> None:
        """`rank` of `num_ranks`, all of them on this host, with `threads` threads on a CPU. Imports vLLM."""
        prepare(compiles, threads=threads)
        import vllm.v1.worker.worker_base  # noqa: F401  the slow part of the start, beside the engine's own

        self._rank, self._num_ranks = rank, num_ranks
        self._worker: Any = None
        self._held: list[Held] = []
        self._transfer = Transfer((), shared=False)
        self._sources: list[torch.Tensor] = []
        """What the next `load` copies: views of the fetched version."""
        self._targets: list[Any] = []
        """Where `_sources` go: views of parameters, and places of experts."""

    def build(self, blob: bytes) -> list[Wanted]:
        """Make vLLM's worker from what its executor sent, with weights of no meaning; returns what it holds."""
        config, init_method = cloudpickle.loads(blob)
        import torch
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        if not torch.cuda.is_available():
            _talk_over_gloo()
        arguments: list[dict[str, Any]] = [{} for _ in range(self._num_ranks)]
        arguments[self._rank] = {
            "vllm_config": config,
            "local_rank": 0,  # each process sees one device
            "rank": self._rank,
            "distributed_init_method": init_method,
            "is_driver_worker": self._rank == 0,
            "shared_worker_lock": get_context("fork").Lock(),  # which leaves no name in /dev/shm
        }
        self._worker = WorkerWrapperBase(rpc_rank=self._rank)
        self._worker.init_worker(arguments)
        self._worker.init_device()
        self._worker.load_model()
        _forget_name_of_queue()
        self._held = held_boxes(self._worker.worker.get_model(), self._rank)
        return [each.box for each in self._held]

    def run(self, blob: bytes, answer: bool) -> bytes:
        """Call a method of vLLM's worker; its result, or None when no `answer` is wanted of this rank."""
        from vllm.v1.outputs import AsyncModelRunnerOutput
        from vllm.v1.serial_utils import run_method

        method, args, kwargs = cloudpickle.loads(blob)
        result = run_method(self._worker, method, args, kwargs)
        if isinstance(result, AsyncModelRunnerOutput):
            result = result.get_output()
        return cloudpickle.dumps(result if answer else None)

    def fetch_as(self, shared: bool) -> None:
        """`shared`: whether versions come in a store's memory, which comes again."""
        self._transfer = Transfer([each.box for each in self._held], shared=shared)

    def plan_for(self, layout: Layout) -> TransferPlan:
        """What this rank copies out of a version. Raises WeightsError for a layout that is not this model's."""
        if self._transfer.follow(layout):
            unknown = layout.names.keys() - {each.box.name for each in self._held}
            if unknown:
                raise WeightsError(
                    f"The learner publishes {min(unknown)}, which the engine does not hold; nothing was written. "
                    "Check that model.path is the same for learner and policy."
                )
            self._targets = self._transfer.targets([each.place for each in self._held])
        return self._transfer.plan

    def stage(self, manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> None:
        """Get ready to load a version, whose blobs stay as they are until `forget`."""
        self.plan_for(manifest.layout)
        self._sources = self._transfer.sources(blobs)

    def forget(self) -> None:
        """Let go of the version that was staged."""
        self._sources = []

    def load(self) -> None:
        """Copy the staged version into the parameters."""
        if not self._sources:
            raise WeightsError("No version was fetched to be loaded.")
        write(self._targets, self._sources)

    def read(self, names: Iterable[str]) -> list[tuple[Wanted, torch.Tensor]]:
        """What is really served of some parameters: boxes of them, by Hugging Face names."""
        wanted = set(names)
        return [(each.box, each.read()) for each in self._held if each.box.name in wanted]


def _talk_over_gloo() -> None:
    """Have the ranks talk over loopback sockets, not in vLLM's own way on a CPU.

    That one spins while it waits, which starves the others of the machine, for ever when a rank has died; and its
    segments in /dev/shm outlive a rank that is killed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _forget_name_of_queue() -> None:
    """Take the name of vLLM's message queue out of /dev/shm, where a rank that is killed would leave it behind.

    All ranks have it mapped by now, and keep it.
    """
    from vllm.distributed.parallel_state import get_tp_group

    queue: Any = get_tp_group().mq_broadcaster
    ring = getattr(queue, "buffer", None)
    if ring is not None and ring.is_creator:
        ring.shared_memory.unlink()
