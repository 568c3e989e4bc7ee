"""From the boxes that learner ranks hold to the boxes that a reader holds: which slice goes where, planned once.

Pure arithmetic over canonical tensors (Hugging Face names): a layout of the learner's and a list of wanted boxes give a
list of copies, which holds for every version of that layout. Fused projections of an engine are no matter of the plan:
a wanted box is wherever its reader keeps it, a slice of a larger parameter among others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge_async.core.errors import WeightsError
from forge_async.weights.manifest import Layout, Shard

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A box of one parameter, as a reader holds it."""

    name: str
    """Hugging Face name of the parameter."""
    dtype: str
    """Such as "float32"."""
    global_shape: Numbers
    """Shape of the whole parameter."""
    offsets: Numbers
    """Where the box begins, in elements a dimension."""
    shape: Numbers
    """Extent of the box; nothing is copied into one without elements."""

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole parameter."""
        return self.shape == self.global_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A box that one learner rank holds and the reader wants: what both have of a parameter."""

    shard: int
    """Place of the shard in the layout."""
    rank: int
    """The learner rank in whose blob it lies."""
    dtype: str
    shape: Numbers
    """Extent of the copied box."""
    start: int
    """Where its first element lies in that blob, in elements from the blob's beginning."""
    strides: Numbers
    """Elements from one to the next, a dimension, in the blob."""
    wanted: int
    """Place of the wanted box in the reader's list."""
    offsets: Numbers
    """Where it begins inside the wanted box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """All copies that one reader makes of a version, ordered by learner rank."""

    copies: tuple[Copy, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Learner ranks of whose blobs something is read, ascending."""
        return tuple(dict.fromkeys(copy.rank for copy in self.copies))

    @property
    def shards(self) -> frozenset[int]:
        """Places in the layout of the shards of which something is read."""
        return frozenset(copy.shard for copy in self.copies)


def wholes(layout: Layout) -> list[Wanted]:
    """What a reader of whole parameters wants: all of each."""
    return [
        Wanted(
            name=name,
            dtype=shards[0].dtype,
            global_shape=shards[0].global_shape,
            offsets=(0,) * len(shards[0].global_shape),
            shape=shards[0].global_shape,
        )
        for name, shards in layout.names.items()
    ]


def compile_plan(layout: Layout, wanted: Sequence[Wanted]) -> TransferPlan:
    """Plan the copies from a layout into wanted boxes.

    Raises WeightsError for the first box of a parameter that the layout does not have, has in another shape or dtype,
    or does not fill.
    """
    copies: list[Copy] = []
    for place, box in enumerate(wanted):
        if not math.prod(box.shape):
            continue
        found = [_copy(layout, shard, place, box) for shard in _shards_of(layout, box)]
        copies += [copy for copy in found if copy is not None]
        filled = sum(math.prod(copy.shape) for copy in found if copy is not None)
        if filled != math.prod(box.shape):
            raise WeightsError(
                f"{box.name}: the learner's shards fill {filled} of the {math.prod(box.shape)} elements that are "
                f"wanted from {box.offsets} on; nothing was written."
            )
    return TransferPlan(copies=tuple(sorted(copies, key=lambda copy: copy.rank)))


def _shards_of(layout: Layout, box: Wanted) -> list[Shard]:
    shards = layout.names.get(box.name)
    if not shards:
        raise WeightsError(
            f"The engine holds {box.name}, which the learner does not publish; nothing was written. "
            "Check that model.path is the same for learner and policy."
        )
    have, want = (shards[0].dtype, shards[0].global_shape), (box.dtype, box.global_shape)
    if have != want:
        raise WeightsError(
            f"The learner publishes {box.name} as {have[0]} {have[1]}, and the engine holds {want[0]} {want[1]}; "
            "nothing was written. Check model.path, policy.dtype and what is published."
        )
    return shards


def _copy(layout: Layout, shard: Shard, place: int, box: Wanted) -> Copy | None:
    """What a shard and a wanted box have in common; None when that is nothing."""
    low = tuple(map(max, shard.offsets, box.offsets))
    high = map(min, _ends(shard.offsets, shard.shape), _ends(box.offsets, box.shape))
    shape = tuple(end - start for start, end in zip(low, high, strict=True))
    if any(size <= 0 for size in shape):
        return None
    strides = shard.strides
    inside = sum(at * stride for at, stride in zip(_minus(low, shard.offsets), strides, strict=True))
    return Copy(
        shard=layout.positions[shard.rank, shard.start_bytes],
        rank=shard.rank,
        dtype=shard.dtype,
        shape=shape,
        start=shard.start + inside,
        strides=strides,
        wanted=place,
        offsets=_minus(low, box.offsets),
    )


def _ends(offsets: Iterable[int], shape: Iterable[int]) -> Numbers:
    return tuple(start + size for start, size in zip(offsets, shape, strict=True))


def _minus(these: Iterable[int], those: Iterable[int]) -> Numbers:
    return tuple(a - b for a, b in zip(these, those, strict=True))
