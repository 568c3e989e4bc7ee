"""torchtitan on a machine without a GPU. Import this module before any other part of torchtitan.

torchtitan 0.3 has no CPU path of its own: it falls back to "cuda" as device type, and gloo lacks the reduction that its
FSDP set-up asks for. Both are mended here, and only on CPU; `titan_attention.py` has kernels with a CPU backward pass.
"""

from __future__ import annotations

import torch
import torchtitan.tools.utils as titan_utils

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torch.distributed.fsdp import FSDPModule  # noqa: E402


def allow_gloo_reduction(model: torch.nn.Module) -> None:
    """gloo has no pre-multiplied sum: have FSDP sum plainly (torchtitan divides by nothing anyway)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
