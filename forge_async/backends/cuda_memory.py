"""Segments in the memory of one GPU, which processes of the same host share by CUDA IPC (`weights.transport=ipc`).

Written against torch 2.13, and unrun: no machine with a GPU has been at hand.

torch's own sharing makes the handles (`torch.multiprocessing.reductions.reduce_tensor`). It counts receivers, to keep
memory that they still use; here it does not matter, since the store keeps a segment as long as somebody holds it.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

from forge_async.core.errors import ConfigError
from forge_async.weights.segments import Segment

DEVICE = 6
"""Place of the device's number among the arguments that `reduce_tensor` returns: it is the sender's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaAddress:
    """What a client opens a segment by."""

    gpu: str
    """Its UUID: processes that see different GPUs number them differently."""
    rebuild: Any
    arguments: tuple[Any, ...]


class CudaMemory:
    """Tensors of this process on one GPU."""

    def __init__(self, number: int) -> None:
        """`number`: the GPU's, of those of the host. Raises ConfigError where this process cannot use it."""
        check_cuda()
        self._ordinal = _ordinal(number)
        self._tensors: dict[int, torch.Tensor] = {}

    def create(self, number: int, num_bytes: int) -> Segment:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{self._ordinal}")
        rebuild, arguments = reduce_tensor(tensor)
        self._tensors[number] = tensor
        address = CudaAddress(gpu=_uuid(self._ordinal), rebuild=rebuild, arguments=arguments)
        return Segment(id=number, num_bytes=num_bytes, address=address)

    def tensor(self, segment: Segment) -> torch.Tensor:
        return self._tensors[segment.id]

    def destroy(self, segment: Segment) -> None:
        del self._tensors[segment.id]
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


class CudaAccess:
    """Such tensors, opened in another process. CUDA cannot open them to be read only."""

    def __init__(self) -> None:
        """Raises ConfigError where this process has no GPU."""
        check_cuda()

    def open(self, segment: Segment, *, writable: bool) -> torch.Tensor:
        address: CudaAddress = segment.address
        found = [each for each in range(torch.cuda.device_count()) if _uuid(each) == address.gpu]
        if not found:
            raise ConfigError(
                f"The GPU of weights.ipc_device ({address.gpu}) is not among those that {_who()} sees; start it with "
                "that GPU in CUDA_VISIBLE_DEVICES, or use weights.transport=shm."
            )
        arguments = (*address.arguments[:DEVICE], found[0], *address.arguments[DEVICE + 1 :])
        return address.rebuild(*arguments)

    def settle(self) -> None:
        for ordinal in range(torch.cuda.device_count()):
            torch.cuda.synchronize(ordinal)


def check_cuda() -> None:
    """Raise ConfigError where torch has no GPU in this process."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"weights.transport=ipc needs a GPU in every process that publishes or reads weights, and {_who()} has "
            "none that torch can use; use weights.transport=shm."
        )


def _ordinal(number: int) -> int:
    """A GPU's number among those that this process sees, from its number on the host."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [str(each) for each in range(torch.cuda.device_count())] if listed is None else listed.split(",")
    if str(number) not in visible:
        raise ConfigError(
            f"weights.ipc_device={number} is not among the GPUs that {_who()} sees ({', '.join(visible)}); "
            "give the number of one of them."
        )
    return visible.index(str(number))


def _uuid(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)


def _who() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"
