"""Shards into one flat blob a rank, and back: a key costs about a millisecond in the store, a byte almost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_async.core.errors import WeightsError
from forge_async.weights.manifest import Manifest, Shard

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64
"""Each shard starts at a multiple of this inside its blob, so that it can be viewed in its own dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A box of a parameter in this process's memory."""

    name: str
    tensor: torch.Tensor
    """The box, of any layout; copied when packed."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


def pack(local_shards: Iterable[LocalShard], rank: int) -> tuple[tuple[Shard, ...], torch.Tensor]:
    """Copy a rank's shards into one blob and describe them.

    Empty boxes (a parameter with fewer rows than ranks leaves some) are left out.

    Returns the shards, digests included, and the blob: uint8 [bytes].
    """
    import torch

    held = [shard for shard in local_shards if shard.tensor.numel()]
    starts, end = [], 0
    for shard in held:
        starts.append(end)
        end += -(-shard.tensor.numel() * shard.tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    blob = torch.zeros(end, dtype=torch.uint8)
    described = []
    for shard, start in zip(held, starts, strict=True):
        num_bytes = shard.tensor.numel() * shard.tensor.element_size()
        box = blob[start : start + num_bytes]
        box.view(shard.tensor.dtype).view(shard.tensor.shape).copy_(shard.tensor.detach())
        described.append(
            Shard(
                name=shard.name,
                dtype=str(shard.tensor.dtype).removeprefix("torch."),
                global_shape=tuple(shard.global_shape),
                offsets=tuple(shard.offsets),
                shape=tuple(shard.tensor.shape),
                rank=rank,
                start_bytes=start,
                num_bytes=num_bytes,
                digest=digest(box),
            )
        )
    return tuple(described), blob


def unpack(manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble every parameter of a version from the blobs of all ranks.

    A parameter held whole by one rank is a view of its blob; others are copied together.
    """
    import torch

    weights: dict[str, torch.Tensor] = {}
    for name, shards in manifest.by_name().items():
        boxes = [_view(shard, blobs[shard.rank]) for shard in shards]
        if shards[0].shape == shards[0].global_shape:
            weights[name] = boxes[0]
            continue
        whole = torch.empty(shards[0].global_shape, dtype=boxes[0].dtype)
        for shard, box in zip(shards, boxes, strict=True):
            whole[slices(shard)] = box
        weights[name] = whole
    return weights


def check_blob(manifest: Manifest, rank: int, blob: torch.Tensor) -> None:
    """Raise WeightsError when a blob as received is not what its rank packed."""
    for shard in manifest.shards:
        if shard.rank != rank:
            continue
        if digest(blob[shard.start_bytes : shard.start_bytes + shard.num_bytes]) != shard.digest:
            raise WeightsError(
                f"{manifest.version}: {shard.name} arrived damaged from the store; the version before it stays in use."
            )


def slices(shard: Shard) -> tuple[slice, ...]:
    """The shard's place inside the whole parameter."""
    return tuple(slice(low, low + size) for low, size in zip(shard.offsets, shard.shape, strict=True))


def digest(tensor: torch.Tensor) -> int:
    """xxh3-64 of a tensor's bytes, in row-major order."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy())  # pyright: ignore[reportArgumentType]


def _view(shard: Shard, blob: torch.Tensor) -> torch.Tensor:
    import torch

    box = blob[shard.start_bytes : shard.start_bytes + shard.num_bytes]
    return box.view(getattr(torch, shard.dtype)).view(shard.shape)
