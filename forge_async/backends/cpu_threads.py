"""With how many threads a process computes on a CPU."""

from __future__ import annotations

import torch


def compute_with(num_threads: int) -> None:
    """Set it for torch, its matrix products, and kernels that the calling thread runs.

    Not `torch.set_num_threads`: vLLM puts a function that does nothing in its place once an engine was built.
    """
    torch._C.set_num_threads(num_threads)
