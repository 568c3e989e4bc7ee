"""What can be seen of memory shared by CUDA IPC without a GPU: refusals, and how a client finds the device."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.multiprocessing import reductions

from forge_async.backends import cuda_memory
from forge_async.backends.cuda_memory import DEVICE, CudaAccess, CudaAddress, CudaMemory
from forge_async.core.errors import ConfigError
from forge_async.weights.segments import Segment


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("end", [lambda: CudaMemory(0), CudaAccess])
def test_a_process_without_a_gpu_is_refused_in_one_sentence(end):
    with pytest.raises(ConfigError, match=r"^weights\.transport=ipc needs a GPU .* use weights\.transport=shm\.$"):
        end()


@pytest.fixture
def two_gpus(monkeypatch):
    """torch as it would be in a process that sees GPUs 3 and 1 of its host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_memory, "_uuid", ["GPU-three", "GPU-one"].__getitem__)


def test_a_gpu_is_named_by_its_number_on_the_host(two_gpus, monkeypatch):
    assert CudaMemory(1)._ordinal == 1
    assert CudaMemory(3)._ordinal == 0
    with pytest.raises(ConfigError, match=r"weights\.ipc_device=0 is not among the GPUs .*\(3, 1\)"):
        CudaMemory(0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert CudaMemory(1)._ordinal == 1


def segment_on(gpu, arguments):
    address = CudaAddress(gpu=gpu, rebuild=lambda *found: found, arguments=arguments)
    return Segment(id=1, num_bytes=4096, address=address)


def test_a_client_opens_a_segment_on_the_same_gpu_whatever_number_the_store_has_for_it(two_gpus):
    arguments = tuple(range(100, 115))
    opened = CudaAccess().open(segment_on("GPU-one", arguments), writable=True)
    assert opened == (*arguments[:DEVICE], 1, *arguments[DEVICE + 1 :])
    with pytest.raises(ConfigError, match="GPU-two.* is not among those"):
        CudaAccess().open(segment_on("GPU-two", arguments), writable=True)


def test_torch_takes_the_device_where_we_put_it():
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)[DEVICE] == "storage_device"
