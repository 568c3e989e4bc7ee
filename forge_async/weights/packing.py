"""Shards into one flat blob a rank, and back: a key costs about a millisecond in the store, a byte almost nothing."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_async.core.errors import WeightsError
from forge_async.weights.manifest import Layout, Manifest, Packed, Part, Shard
from forge_async.weights.reshard import Copy, TransferPlan, Wanted, compile_plan, wholes

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
    dtype: torch.dtype | None = None
    """As it is packed; None: as the tensor is."""

    @property
    def packed_dtype(self) -> torch.dtype:
        """Of its elements in a blob."""
        return self.dtype or self.tensor.dtype


class Packer:
    """Copies a rank's shards into blobs. Where each of them goes is planned once, and again when the shards change."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._looks: list[tuple] = []
        """What the plan was made for."""
        self._part = Part.of(rank, (), 0)
        self._views = Views()

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
            views = _views(self._part.shards, blob)
        else:
            views = self._views.of(self._part.id, self._part.shards, blob)
        if held:
            with torch.no_grad():
                torch._foreach_copy_(views, [shard.tensor for shard in held])
        return self._part, blob

    def forget_memory(self) -> None:
        """Let go of the memory that blobs lay in: it will not come again. From any thread, also while it packs."""
        self._views.forget()

    def _is_planned(self, held: Sequence[LocalShard]) -> bool:
        # One tuple at a time: many thousands at once set off the garbage collector.
        same_length = len(held) == len(self._looks)
        return same_length and all(_look(shard) == look for shard, look in zip(held, self._looks, strict=True))


def unpacked(part: Part, blob: torch.Tensor) -> list[LocalShard]:
    """The shards of a packed blob, in its memory."""
    return [
        LocalShard(name=shard.name, tensor=view, global_shape=shard.global_shape, offsets=shard.offsets)
        for shard, view in zip(part.shards, _views(part.shards, blob), strict=True)
    ]


class Views:
    """Views of boxes in blobs of a store's memory, made once for each piece of that memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, int], list[torch.Tensor]] = {}

    def of(self, id: Hashable, boxes: Sequence[Shard | Copy], blob: torch.Tensor) -> list[torch.Tensor]:
        """A view of each box of a blob; `id` stands for the boxes. It keeps the memory alive while it is remembered."""
        key, known = (id, blob.data_ptr()), self._known
        views = known.pop(key, None) or _views(boxes, blob)
        known[key] = views
        while len(known) > REMEMBERED_BLOBS:
            del known[next(iter(known))]
        return views

    def forget(self) -> None:
        """Remember none. Whoever is being given some has them, and nobody else."""
        self._known = {}


def _look(shard: LocalShard) -> tuple:
    return shard.name, shard.packed_dtype, shard.tensor.shape, shard.global_shape, shard.offsets


def _plan(held: Sequence[LocalShard], rank: int) -> Part:
    shards, end = [], 0
    for shard in held:
        num_bytes = shard.tensor.numel() * shard.packed_dtype.itemsize
        shards.append(
            Shard(
                name=shard.name,
                dtype=str(shard.packed_dtype).removeprefix("torch."),
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
    """xxh3-64 of every shard in a rank's blob, 8 bytes each. Releases Python's global lock for large shards.

    A blob in a GPU's memory is copied to this process's for it.
    """
    return _digests(part.shards, blob)


def _digests(shards: Sequence[Shard], blob: torch.Tensor) -> bytes:
    import xxhash

    flat, hashed = blob.cpu().numpy(), xxhash.xxh3_64_intdigest
    found = [
        hashed(flat[each.start_bytes : each.start_bytes + each.num_bytes])  # pyright: ignore[reportArgumentType]
        for each in shards
    ]
    return struct.pack(f"<{len(found)}Q", *found)


class Transfer:
    """Replays the plan from the learner's layout to the boxes of one reader, version after version."""

    def __init__(self, wanted: Sequence[Wanted] | None = None, *, shared: bool) -> None:
        """Args:
        wanted: the reader's boxes; None: every parameter, whole.
        shared: whether blobs are a store's memory, which comes again, or this process's own, used once.
        """
        self._asked, self._shared = wanted, shared
        self._layout: tuple[str, ...] | None = None
        self.wanted: Sequence[Wanted] = wanted or ()
        self.plan = TransferPlan(copies=())
        self._parts: dict[int, tuple[Copy, ...]] = {}
        """The copies out of each rank's blob."""
        self._views = Views()

    def plan_for(self, layout: Layout) -> TransferPlan:
        """The plan for a layout, which is followed from now on. Raises like `compile_plan`."""
        self.follow(layout)
        return self.plan

    def follow(self, layout: Layout) -> bool:
        """Plan for a layout, unless that was the last one; whether it is another. Raises like `compile_plan`."""
        if layout.ids == self._layout:
            return False
        wanted = wholes(layout) if self._asked is None else self._asked
        self.plan, self.wanted, self._layout = compile_plan(layout, wanted), wanted, layout.ids
        self._parts = {rank: tuple(copy for copy in self.plan.copies if copy.rank == rank) for rank in self.plan.ranks}
        self._views = Views()
        return True

    def sources(self, blobs: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """A view into the blobs for each copy of the plan, in its order."""
        of = self._views.of if self._shared else lambda _, boxes, blob: _views(boxes, blob)
        return [view for rank, boxes in self._parts.items() for view in of(rank, boxes, blobs[rank])]

    def targets(self, held: Sequence[Any]) -> list[Any]:
        """Where each copy of the plan goes in the reader's tensors, or whatever can be cut like tensors.

        `held`: in the order of the reader's boxes.
        """
        return [held[copy.wanted][_slices(copy.offsets, copy.shape)] for copy in self.plan.copies]


class Unpacker:
    """Assembles versions for one reader. What it gave for a version is gone when it is asked for the next."""

    def __init__(self, *, shared: bool) -> None:
        """`shared`: whether blobs are a store's memory, which comes again, or this process's own, used once."""
        self._transfer = Transfer(shared=shared)
        self._own: list[torch.Tensor | None] = []
        """Memory for each parameter that no rank holds whole."""
        self._targets: list[torch.Tensor | None] = []
        """Where in it each copy goes."""

    def unpack(self, manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every parameter of a version, from the blobs of all ranks.

        A parameter held whole by one rank is a view of its blob; others are copied together, into the same memory each
        time.
        """
        import torch

        transfer = self._transfer
        is_other = transfer.follow(manifest.layout)
        copies, wanted, sources = transfer.plan.copies, transfer.wanted, transfer.sources(blobs)
        if is_other:
            self._make_room(sources)
        moved = [(to, view) for to, view in zip(self._targets, sources, strict=True) if to is not None]
        if moved:
            torch._foreach_copy_([to for to, _ in moved], [view for _, view in moved])
        weights: dict[str, torch.Tensor] = {}
        for copy, view in zip(copies, sources, strict=True):
            own = self._own[copy.wanted]
            weights[wanted[copy.wanted].name] = view if own is None else own
        return weights

    def _make_room(self, sources: Sequence[torch.Tensor]) -> None:
        """Memory beside the blobs, on a GPU if they are."""
        import torch

        plan, wanted = self._transfer.plan, self._transfer.wanted
        num_copies = Counter(copy.wanted for copy in plan.copies)
        devices = {copy.wanted: source.device for copy, source in zip(plan.copies, sources, strict=True)}
        self._own = [
            torch.empty(box.shape, dtype=getattr(torch, box.dtype), device=devices[place])
            if num_copies[place] > 1
            else None
            for place, box in enumerate(wanted)
        ]
        owns = [self._own[copy.wanted] for copy in plan.copies]
        self._targets = [
            None if own is None else own[_slices(copy.offsets, copy.shape)]
            for own, copy in zip(owns, plan.copies, strict=True)
        ]


def unpack(manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Assemble every parameter of one version."""
    return Unpacker(shared=False).unpack(manifest, blobs)


def check_blob(manifest: Manifest, rank: int, blob: torch.Tensor, only: Collection[int] | None = None) -> None:
    """Raise WeightsError when a blob as received is not what its rank packed. Does nothing without digests.

    `only`: the shards to look at, by their places in the layout; None: all.
    """
    if not manifest.digests:
        return
    part = next(part for part in manifest.layout.parts if part.rank == rank)
    if blob.numel() < part.blob_bytes:
        raise WeightsError(
            f"{manifest.version}: {part.shards[-1].name} arrived damaged from the store: rank {rank}'s blob has "
            f"{blob.numel()} of {part.blob_bytes} bytes; the version before it stays in use."
        )
    places = manifest.layout.positions
    shards = [each for each in part.shards if only is None or places[rank, each.start_bytes] in only]
    found = struct.unpack(f"<{len(shards)}Q", _digests(shards, blob))
    for shard, value in zip(shards, found, strict=True):
        if value != manifest.digest_of(shard):
            raise WeightsError(
                f"{manifest.version}: {shard.name} arrived damaged from the store; the version before it stays in use."
            )


def slices(shard: Shard) -> tuple[slice, ...]:
    """The shard's place inside the whole parameter."""
    return _slices(shard.offsets, shard.shape)


def digest(tensor: torch.Tensor) -> int:
    """xxh3-64 of a tensor's bytes, in row-major order."""
    import torch
    import xxhash

    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(flat.numpy())  # pyright: ignore[reportArgumentType]


def _slices(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(offsets, shape, strict=True))


def _views(boxes: Sequence[Shard | Copy], blob: torch.Tensor) -> list[torch.Tensor]:
    """A view of each box in a blob."""
    import torch

    typed = {dtype: blob.view(getattr(torch, dtype)) for dtype in {box.dtype for box in boxes}}
    begin = {dtype: flat.storage_offset() for dtype, flat in typed.items()}
    return [typed[box.dtype].as_strided(box.shape, box.strides, begin[box.dtype] + box.start) for box in boxes]
