"""torchtitan on a machine without a GPU. Import this module before any other part of torchtitan.

torchtitan 0.3 has no CPU path of its own: it falls back to "cuda" as device type, its attention kernels have no CPU
backward pass, and gloo lacks the reduction that its FSDP set-up asks for. Each is mended here, and only on CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import torchtitan.tools.utils as titan_utils

ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402


class CpuAttention(VarlenAttention):
    """Attention over packed rows with a dense mask; takes `document_mask`'s tensor in place of torchtitan's masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Same fields; being a VarlenAttention.Config keeps torchtitan's own checks and sharding working."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: torch.Tensor, scale=None, enable_gqa=False, **_
    ) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        attended = F.scaled_dot_product_attention(
            *heads_first, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, L, L]: may token i look at token j? Only inside one document, only backwards.

    Args:
        positions: int64 [B, L]; a document begins where the position is 0.
    """
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def allow_gloo_reduction(model: torch.nn.Module) -> None:
    """gloo has no pre-multiplied sum: have FSDP sum plainly (torchtitan divides by nothing anyway)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
