"""The torch.distributed world of processes that hold a torchtitan model together: device, mesh, determinism."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from forge_async.backends import titan_cpu

# isort: split
import torch
import torch.distributed as dist
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_distributed
from torchtitan.tools import utils as titan_utils

from forge_async.backends.cpu_threads import compute_with
from forge_async.core.errors import ConfigError
from forge_async.learner.settings import LearnerSettings


class InContext(Protocol):
    """Makes what a forward or backward pass runs in."""

    def __call__(self) -> AbstractContextManager[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What this rank's part of a model is built for."""

    device: torch.device
    dims: ParallelDims
    parallelism: ParallelismConfig
    in_context: InContext

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def batch_ranks(self) -> int:
        """How many shares a batch is split into (the data-parallel degree)."""
        mesh = self.dims.get_optional_mesh("batch")
        return mesh.size() if mesh is not None else 1

    @property
    def batch_rank(self) -> int:
        """Which share is this rank's."""
        mesh = self.dims.get_optional_mesh("batch")
        return mesh.get_local_rank() if mesh is not None else 0


def join_world(settings: LearnerSettings, seed: int, *, key: str = "learner.ranks") -> World:
    """Join the other ranks; expects the environment of torch's elastic launch (RANK, WORLD_SIZE, MASTER_ADDR ...).

    Raises ConfigError when their number is not `settings.ranks`, whose name is `key`.
    """
    if titan_cpu.ON_CPU:
        compute_with(settings.threads)
    device = own_device(titan_utils.device_type)
    titan_utils.device_module.set_device(device)
    parallelism = ParallelismConfig(
        spmd_backend="partial_dtensor",
        tensor_parallel_degree=settings.tensor_parallel,
        expert_parallel_degree=settings.expert_parallel,
    )
    world_size = titan_distributed.init_distributed(CommConfig(trace_buf_size=0))
    if world_size != settings.ranks:
        raise ConfigError(f"{key}={settings.ranks}, but {world_size} processes were started for it.")
    dims = ParallelDims.from_config(parallelism, world_size)
    titan_distributed.set_spmd_backend(parallelism.spmd_backend)
    titan_distributed.set_determinism(dims, device, DebugConfig(seed=seed), distinct_seed_mesh_dims=["pp"])
    in_context = titan_distributed.get_spmd_context(parallel_dims=dims)
    return World(device=device, dims=dims, parallelism=parallelism, in_context=in_context)


def own_device(kind: str) -> torch.device:
    """This process's device: of the GPUs that a rank sees its own is the first, whatever others follow.

    See `actors/procs.py`; torchtitan's rule goes by LOCAL_RANK as soon as a process sees two of them.
    """
    return torch.device(kind, 0)


def leave_world() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
