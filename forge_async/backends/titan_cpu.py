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

DENSE_MASK_ENTRIES = 1 << 22
"""Entries of a dense mask, rows x width x width, up to which it is made: one call for all documents is faster while
they are short. A row of 2,048 tokens is the widest with one."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Where documents lie in packed rows, for rows too wide for a dense mask."""

    spans: tuple[tuple[int, int, int], ...]
    """(row, first column, column after the last) of each, in order; they tile the rows."""


class CpuAttention(VarlenAttention):
    """Attention over packed rows; takes what `attention_masks` gives in place of torchtitan's masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Same fields; being a VarlenAttention.Config keeps torchtitan's own checks and sharding working."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: torch.Tensor | Documents, scale=None, enable_gqa=False, **_
    ) -> torch.Tensor:
        heads_first = tuple(tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        if isinstance(attention_masks, Documents):
            return _attend_documents(heads_first, attention_masks, scale).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            *heads_first, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


def attention_masks(positions: torch.Tensor) -> torch.Tensor | Documents:
    """What `CpuAttention` takes: a dense mask, or where it would be too large, where each document lies.

    Args:
        positions: int64 [B, L]; a document begins where the position is 0.
    """
    rows, width = positions.shape
    return document_mask(positions) if rows * width * width <= DENSE_MASK_ENTRIES else documents(positions)


def document_mask(positions: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, L, L]: may token i look at token j? Only inside one document, only backwards."""
    document = (positions == 0).cumsum(1)
    same = document[:, :, None] == document[:, None, :]
    return same.tril()[:, None]


def documents(positions: torch.Tensor) -> Documents:
    """The documents of packed rows."""
    width = positions.shape[1]
    spans: list[tuple[int, int, int]] = []
    for row, line in enumerate(positions):
        starts = [*(line == 0).nonzero().flatten().tolist(), width]
        spans += [(row, start, stop) for start, stop in zip(starts[:-1], starts[1:], strict=True)]
    return Documents(tuple(spans))


def _attend_documents(heads_first: tuple[torch.Tensor, ...], where: Documents, scale: float | None) -> torch.Tensor:
    """[B, N, L, H]: each document by itself with the kernel that never holds [L, L].

    That kernel knows no grouped heads on CPU, so keys and values are repeated for it.
    """
    queries, keys, values = heads_first
    groups = queries.shape[1] // keys.shape[1]
    rows: list[list[torch.Tensor]] = [[] for _ in range(len(queries))]
    for row, start, stop in where.spans:
        query = queries[row : row + 1, :, start:stop]
        key, value = (each[row : row + 1, :, start:stop].repeat_interleave(groups, dim=1) for each in (keys, values))
        rows[row].append(F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale))
    return torch.cat([torch.cat(parts, dim=2) for parts in rows])


def allow_gloo_reduction(model: torch.nn.Module) -> None:
    """gloo has no pre-multiplied sum: have FSDP sum plainly (torchtitan divides by nothing anyway)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
