"""Shards into one flat blob a rank, and back: a key costs about a millisecond in the store, a byte almost nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_async.core.errors import WeightsError
from forge_async.weights.manifest import Manifest, Packed, Part, Shard

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64
"""Each shard starts at a multiple of this inside its blob, so that it can be viewed in its own dtype."""

REMEMBERED_BLOBS = 8
"""Blobs of a store's memory whose views are kept: they come back again and again, and a view costs microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """A box of a parameter in this process's memory."""

    name: str
    tensor: torch.Tensor
    """The box, of any layout; copied when packed."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]


class Packer:
    """Copies a rank's shards into blobs. Where each of them goes is planned once, and again when the shards change."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._looks: list[tuple] = []
        """What the plan was made for."""
        self._part = Part.of(rank, (), 0)
        self._boxes = Boxes()

    @property
    def blob_bytes(self) -> int:
        """Size of the last blob; 0 before the first."""
        return self._part.blob_bytes

    def pack(self, local_shards: Iterable[LocalShard], blob: torch.Tensor | None = None) -> tuple[Part, torch.Tensor]:
        """Copy shards into a blob and describe them.

        Empty boxes (a parameter with fewer rows than ranks leaves some) are left out.

        Args:
            local_shards: in the same order each time.
            blob: uint8 memory of a store to use if it has the right size; else new memory is taken.

        Returns the description and the blob: uint8 [bytes].
        """
        import torch

        held = [shard for shard in local_shards if shard.tensor.numel()]
        if not self._is_planned(held):
            self._part, self._looks = _plan(held, self._rank), list(map(_look, held))
        if blob is None or blob.numel() != self._part.blob_bytes:
            blob = torch.zeros(self._part.blob_bytes, dtype=torch.uint8)
            views = _boxes(self._part, blob)
        else:
            views = self._boxes.of(self._part, blob)
        if held:
            with torch.no_grad():
                torch._foreach_copy_(views, [shard.tensor for shard in held])
        return self._part, blob

    def _is_planned(self, held: Sequence[LocalShard]) -> bool:
        # One tuple at a time: many thousands at once set off the garbage collector.
        same_length = len(held) == len(self._looks)
        return same_length and all(_look(shard) == look for shard, look in zip(held, self._looks, strict=True))


class Boxes:
    """Views of the shards in blobs of a store's memory, made once for each piece of that memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[torch.Tensor]] = {}

    def of(self, part: Part, blob: torch.Tensor) -> list[torch.Tensor]:
        """A view of each shard of a blob. It keeps the memory alive while it is remembered."""
        key = (part.id, blob.data_ptr())
        views = self._known.pop(key, None) or _boxes(part, blob)
        self._known[key] = views
        while len(self._known) > REMEMBERED_BLOBS:
            del self._known[next(iter(self._known))]
        return views


def _look(shard: LocalShard) -> tuple:
    return shard.name, shard.tensor.dtype, shard.tensor.shape, shard.global_shape, shard.offsets


def _plan(held: Sequence[LocalShard], rank: int) -> Part:
    shards, end = [], 0
    for shard in held:
        num_bytes = shard.tensor.numel() * shard.tensor.element_size()
        shards.append(
            Shard(
                name=shard.name,
                dtype=str(shard.tensor.dtype).removeprefix("torch."),
                global_shape=tuple(shard.global_shape),
                offsets=tuple(shard.offsets),
                shape=tuple(shard.tensor.shape),
                rank=rank,
                start_bytes=end,
                num_bytes=num_bytes,
            )
        )
        end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Part.of(rank, shards, end)


def pack(local_shards: Iterable[LocalShard], rank: int) -> tuple[Packed, torch.Tensor]:
    """Copy a rank's shards into a new blob and describe them, digests included."""
    part, blob = Packer(rank).pack(local_shards)
    return Packed(part=part, digests=digests(part, blob)), blob


def digests(part: Part, blob: torch.Tensor) -> bytes:
    """xxh3-64 of every shard in a rank's blob, 8 bytes each. Releases Python's global lock for large shards."""
    import xxhash

    flat, hashed = blob.numpy(), xxhash.xxh3_64_intdigest
    found = [
        hashed(flat[each.start_bytes : each.start_bytes + each.num_bytes])  # pyright: ignore[reportArgumentType]
        for each in part.shards
    ]
    return struct.pack(f"<{len(found)}Q", *found)


class Unpacker:
    """Assembles versions for one reader. What it gave for a version is gone when it is asked for the next."""

    def __init__(self, *, shared: bool) -> None:
        """`shared`: whether blobs are a store's memory, which comes again, or this process's own, used once."""
        self._boxes = Boxes() if shared else None
        self._layout: tuple[str, ...] = ()
        self._wholes: dict[str, torch.Tensor] = {}

    def unpack(self, manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every parameter of a version, from the blobs of all ranks.

        A parameter held whole by one rank is a view of its blob; others are copied together, into the same memory each
        time.
        """
        if manifest.layout.ids != self._layout:
            self._layout, self._wholes = manifest.layout.ids, _wholes(manifest)
        of = self._boxes.of if self._boxes is not None else _boxes
        flat = (box for part in manifest.layout.parts if part.shards for box in of(part, blobs[part.rank]))
        weights: dict[str, torch.Tensor] = {}
        for shard, box in zip(manifest.shards, flat, strict=True):
            if shard.is_whole:
                weights[shard.name] = box
            else:
                weights[shard.name] = self._wholes[shard.name]
                weights[shard.name][slices(shard)] = box
        return weights


def _wholes(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Memory for the parameters that no rank holds whole."""
    import torch

    split = {shard.name: shard for shard in manifest.shards if not shard.is_whole}
    return {name: torch.empty(each.global_shape, dtype=getattr(torch, each.dtype)) for name, each in split.items()}


def unpack(manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble every parameter of one version."""
    return Unpacker(shared=False).unpack(manifest, blobs)


def check_blob(manifest: Manifest, rank: int, blob: torch.Tensor) -> None:
    """Raise WeightsError when a blob as received is not what its rank packed. Does nothing without digests."""
    if not manifest.digests:
        return
    part = next(part for part in manifest.layout.parts if part.rank == rank)
    if blob.numel() < part.blob_bytes:
        raise WeightsError(
            f"{manifest.version}: {part.shards[-1].name} arrived damaged from the store: rank {rank}'s blob has "
            f"{blob.numel()} of {part.blob_bytes} bytes; the version before it stays in use."
        )
    found = struct.unpack(f"<{len(part.shards)}Q", digests(part, blob))
    for shard, value in zip(part.shards, found, strict=True):
        if value != manifest.digest_of(shard):
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


def _boxes(part: Part, blob: torch.Tensor) -> list[torch.Tensor]:
    """A view of each shard in a blob."""
    import torch

    dtypes = {dtype: getattr(torch, dtype) for dtype in {shard.dtype for shard in part.shards}}
    return [
        blob[shard.start_bytes : shard.start_bytes + shard.num_bytes].view(dtypes[shard.dtype]).view(shard.shape)
        for shard in part.shards
    ]
