"""Attention over packed rows, in which samples may share the prompt that they begin with.

Positions alone say what lies where (`learner/rows.py`): a part begins where they do not go on by one. A part that
begins at 0 is a sample; one that begins at k is a sample whose first k tokens are those of the last part before it that
begins at 0. A token looks at the tokens of its own part up to itself, and at the first k of that sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from forge_async.backends import titan_cpu  # before any other part of torchtitan

# isort: split
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from torchtitan.distributed.utils import is_in_batch_invariant_mode
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from forge_async.learner.settings import MASK_ENTRIES


@dataclass(frozen=True, slots=True)
class Part:
    """A sample, or what of it stands in the row after the beginning that it shares."""

    row: int
    start: int
    """Its first column."""
    stop: int
    """The column after its last."""
    prefix: int
    """Column of the sample that it shares its beginning with."""
    skipped: int
    """So many tokens of that sample are its own beginning; 0: it stands whole."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """For a kernel that takes parts of unequal lengths: keys and values, each part's beginning gathered before it."""

    metadata: VarlenMetadata
    """Where each part's queries lie on the flat axis of all rows, and its keys on that of the gathered ones."""
    places: torch.Tensor
    """int64 [gathered keys]: which of the flat axis each is."""


Masks: TypeAlias = torch.Tensor | Sequence[Part] | Gathered | VarlenMetadata


class CpuAttention(VarlenAttention):
    """Attention by torch's own kernels; takes a mask, or parts, in place of torchtitan's masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Same fields; being a VarlenAttention.Config keeps torchtitan's own checks and sharding working."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks: torch.Tensor | Sequence[Part],
        scale=None,
        enable_gqa=False,
        **_,
    ) -> torch.Tensor:
        heads_first = tuple(tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        if not isinstance(attention_masks, torch.Tensor):
            return _attend_parts(heads_first, attention_masks, scale).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            *heads_first, attn_mask=attention_masks, scale=scale, enable_gqa=enable_gqa
        )
        return attended.transpose(1, 2)


class SharedVarlenAttention(VarlenAttention):
    """torchtitan's attention for GPUs, and the same with gathered keys where samples share prompts. UNRUN on a GPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """Same fields."""

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: Any, scale=None, enable_gqa=False, **rest) -> Any:
        if not isinstance(attention_masks, Gathered):
            return super().forward(
                q_BLNH, k_BLNH, v_BLNH, attention_masks=attention_masks, scale=scale, enable_gqa=enable_gqa, **rest
            )
        metadata, places = attention_masks.metadata, attention_masks.places
        queries = q_BLNH.flatten(0, 1).to(torch.bfloat16)
        # Gathered from float32, in which the gradients of all that share a beginning are summed, then.
        wide = torch.promote_types(k_BLNH.dtype, torch.float32)
        keys, values = (each.flatten(0, 1).to(wide)[places].to(torch.bfloat16) for each in (k_BLNH, v_BLNH))
        # As VarlenAttention has it: FlashAttention 2 with splits of its own choosing may give NaN.
        one_split = current_flash_attention_impl() in (None, "FA2") or is_in_batch_invariant_mode()
        # Where a part has fewer queries than keys the kernel aligns both at their ends, as is wanted here.
        attended = varlen_attn(
            queries,
            keys,
            values,
            metadata.cu_seq_q,
            metadata.cu_seq_k,
            metadata.max_q,
            metadata.max_k,
            scale=scale,
            window_size=self.window_size,
            enable_gqa=enable_gqa,
            num_splits=1 if one_split and torch.version.hip is None else None,
        )
        assert isinstance(attended, torch.Tensor)
        return attended.view(*q_BLNH.shape[:2], -1, v_BLNH.shape[-1]).to(q_BLNH.dtype)


def attention_config() -> VarlenAttention.Config:
    """Of the attention that every layer of a model gets, on this machine."""
    return CpuAttention.Config() if titan_cpu.ON_CPU else SharedVarlenAttention.Config()


def attention_masks(model: Any, positions: torch.Tensor) -> Masks:
    """What a model's attention takes for these rows.

    Args:
        model: torchtitan's.
        positions: int64 [B, L], as above.
    """
    rows, width = positions.shape
    if titan_cpu.ON_CPU:
        return mask_of(positions) if rows * width * width <= MASK_ENTRIES else parts_of(positions)
    parts = parts_of(positions)
    if any(part.skipped for part in parts):
        return gathered(parts, width, positions.device)
    return model.get_attention_masks(positions)


def mask_of(positions: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, L, L]: may token i look at token j?"""
    begins = _begins(positions)
    part = begins.cumsum(1)
    own = part[:, :, None] == part[:, None, :]
    columns = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    start = torch.where(begins, columns, 0).cummax(1).values
    skipped = positions.gather(1, start)
    if bool(skipped.any()):
        prefix = torch.where(begins & (positions == 0), columns, 0).cummax(1).values
        at = columns[:, None, :]
        own = own | ((at >= prefix[:, :, None]) & (at < (prefix + skipped)[:, :, None]))
    return own.tril()[:, None]


def parts_of(positions: torch.Tensor) -> list[Part]:
    """The parts of packed rows, in order; they tile the rows."""
    positions = positions.cpu()  # one copy in place of some for each row
    begins, found = _begins(positions), []
    for row, line in enumerate(positions):
        starts = begins[row].nonzero().flatten()
        columns, skipped, prefix = starts.tolist(), line[starts].tolist(), 0
        for start, stop, length in zip(columns, [*columns[1:], len(line)], skipped, strict=True):
            prefix = prefix if length else start
            found.append(Part(row, start, stop, prefix, length))
    return found


def gathered(parts: Sequence[Part], width: int, device: torch.device) -> Gathered:
    """What the kernel for parts of unequal lengths is given.

    Args:
        parts: of all rows, in order.
        width: of the rows.
        device: of the model.
    """
    queries = [part.stop - part.start for part in parts]
    keys = [part.skipped + count for part, count in zip(parts, queries, strict=True)]
    spans = [
        part.row * width + torch.arange(start, start + count)
        for part in parts
        for start, count in ((part.prefix, part.skipped), (part.start, part.stop - part.start))
        if count
    ]
    ends = (torch.tensor([0, *counts]).cumsum(0).to(torch.int32).to(device) for counts in (queries, keys))
    cu_seq_q, cu_seq_k = ends
    metadata = VarlenMetadata(cu_seq_q=cu_seq_q, cu_seq_k=cu_seq_k, max_q=max(queries), max_k=max(keys))
    return Gathered(metadata=metadata, places=torch.cat(spans).to(device))


def _begins(positions: torch.Tensor) -> torch.Tensor:
    """bool [B, L]: does a part begin here?"""
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return begins


def _attend_parts(heads_first: tuple[torch.Tensor, ...], parts: Sequence[Part], scale: float | None) -> torch.Tensor:
    """[B, N, L, H]: each part by itself, with kernels that never hold [L, L].

    They know no grouped heads on CPU, so keys and values are repeated for them.
    """
    queries, keys, values = heads_first
    groups = queries.shape[1] // keys.shape[1]
    rows: list[list[torch.Tensor]] = [[] for _ in range(len(queries))]
    for part in parts:
        at = slice(part.row, part.row + 1)
        query = queries[at, :, part.start : part.stop]
        key, value = (_with_beginning(each[at], part).repeat_interleave(groups, dim=1) for each in (keys, values))
        if part.skipped <= query.shape[2]:
            # As if the beginning asked too: less than the entries of a mask, of which the backward pass would keep all.
            query = F.pad(query, (0, 0, part.skipped, 0))
            found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            rows[part.row].append(found[:, :, part.skipped :])
            continue
        for begun in range(0, query.shape[2], lot := max(1, MASK_ENTRIES // key.shape[2])):
            some = query[:, :, begun : begun + lot]
            seen = part.skipped + begun + some.shape[2]
            last = torch.arange(part.skipped + begun, seen, device=query.device)
            mask = torch.arange(seen, device=query.device) <= last[:, None]
            rows[part.row].append(
                F.scaled_dot_product_attention(some, key[:, :, :seen], value[:, :, :seen], attn_mask=mask, scale=scale)
            )
    return torch.cat([torch.cat(of_row, dim=2) for of_row in rows])


def _with_beginning(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """[1, N, tokens, H]: of [1, N, L, H], a row's keys or values, the part's own and those of its beginning before."""
    own = tensor[:, :, part.start : part.stop]
    return torch.cat([tensor[:, :, part.prefix : part.prefix + part.skipped], own], dim=2) if part.skipped else own
