"""Both ends of a chain of deltas: what a writer published last, and what a reader read last, bit for bit.

Each end keeps a copy in its own memory, in the dtype that is published. The engine's parameters would not do: they may
be laid out, split or quantised otherwise, and a delta that fails half way must not leave them torn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_async.core.errors import DeltaError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights import delta
from forge_async.weights.manifest import Coding, Manifest, Part
from forge_async.weights.packing import check_blob

if TYPE_CHECKING:
    import torch

SHARD, DELTA = "/shard/", "/delta/"
"""Between version and rank, in the key of a whole blob and of a delta."""
MOST_OF_WHOLE = 0.5
"""A delta that takes more of the whole's bytes is not worth a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What one rank staged last."""

    version: PolicyVersion
    part: Part
    blob: torch.Tensor
    chain: tuple[PolicyVersion, ...]


class DeltaWriter:
    """Keeps what each rank of this process staged last, and says what changed since."""

    def __init__(self, anchor_every: int) -> None:
        """One in `anchor_every` versions is whole."""
        self._anchor_every = anchor_every
        self._last: dict[int, Published] = {}
        self._spare: dict[int, torch.Tensor] = {}
        """Memory that holds nothing any more, by its size."""

    def take_memory(self, num_bytes: int) -> torch.Tensor | None:
        """Memory of an older version for the next snapshot, uint8 [num_bytes], if there is some."""
        return self._spare.pop(num_bytes, None)

    def last(self, rank: int) -> Published | None:
        """What a rank staged last."""
        return self._last.get(rank)

    def base(self, version: PolicyVersion, part: Part) -> Published | None:
        """What a delta of this part may be made from; None when the version has to be whole."""
        last = self._last.get(part.rank)
        if last is None or not part.blob_bytes or last.part.id != part.id or last.version.policy != version.policy:
            return None
        return last if last.version < version and len(last.chain) < self._anchor_every else None

    def note(self, published: Published) -> None:
        """It is staged: the next delta begins there. Its blob must not be written to any more."""
        old = self._last.get(published.part.rank)
        if old is not None and old.blob is not published.blob:
            self._spare = {old.part.blob_bytes: old.blob}
        self._last[published.part.rank] = published


def encode(base: Published, part: Part, blob: torch.Tensor) -> delta.Delta | None:
    """What a blob changes in the one before; None when it is better published whole."""
    return delta.encode(part, base.blob, blob, most_bytes=int(MOST_OF_WHOLE * part.blob_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A version in a reader's own memory."""

    version: PolicyVersion
    part_ids: Mapping[int, str]
    blobs: Mapping[int, torch.Tensor]
    """By rank."""

    @classmethod
    def of(cls, manifest: Manifest, blobs: Mapping[int, torch.Tensor]) -> Held:
        """What a reader has after it read a version."""
        part_ids = {part.rank: part.id for part in manifest.layout.parts}
        return cls(version=manifest.version, part_ids=part_ids, blobs=dict(blobs))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A blob or a delta to be read."""

    rank: int
    version: PolicyVersion
    is_delta: bool

    @property
    def key(self) -> str:
        """In the store."""
        return f"{self.version}{DELTA if self.is_delta else SHARD}{self.rank}"


def wanted(manifest: Manifest, held: Held | None) -> list[Wanted]:
    """What must be read for a version, rank by rank, in the order in which it is put together.

    A part that is stored as a delta takes the deltas since what is held, or the last whole blob and all deltas since.
    """
    codings = manifest.codings or (Coding(chain=(manifest.version,), num_bytes=0),) * len(manifest.layout.parts)
    found = []
    for part, coding in zip(manifest.layout.parts, codings, strict=True):
        links = [Wanted(part.rank, version, place > 0) for place, version in enumerate(coding.chain)]
        if held is not None and held.part_ids.get(part.rank) == part.id and held.version in coding.chain:
            links = links[coding.chain.index(held.version) + 1 :]
        found += links if part.blob_bytes else []
    return found


def rebuild(
    manifest: Manifest,
    fetched: Sequence[tuple[Wanted, torch.Tensor]],
    held: Held | None,
    own: Callable[[int, torch.Tensor], torch.Tensor],
    only: Collection[int] | None = None,
) -> dict[int, torch.Tensor]:
    """The blob of each rank, checked against the manifest's digests. What is held is changed in place.

    Args:
        manifest: of the version.
        fetched: what `wanted` asked for, in its order.
        held: as it was given to `wanted`.
        own: makes of a rank's whole blob, as it was read, one that may be written to.
        only: the shards to check, by their places in the layout; None: all.

    Raises DeltaError when deltas do not lead to what the manifest says, WeightsError when a whole blob is damaged.
    """
    parts = {part.rank: part for part in manifest.layout.parts if part.blob_bytes}
    blobs = {rank: blob for rank, blob in (held.blobs if held is not None else {}).items() if rank in parts}
    try:
        for link, value in fetched:
            if not link.is_delta:
                blobs[link.rank] = own(link.rank, value)
            else:
                _apply(parts[link.rank], blobs[link.rank], value)
        for rank, blob in blobs.items():
            check_blob(manifest, rank, blob, only)
    except WeightsError as error:
        if manifest.kind != "delta":
            raise
        raise DeltaError(f"{manifest.version} cannot be rebuilt from its deltas: {error}") from error
    return blobs


def _apply(part: Part, blob: torch.Tensor, stream: torch.Tensor) -> None:
    if blob.numel() != part.blob_bytes:
        raise DeltaError(f"rank {part.rank}'s blob has {blob.numel()} of {part.blob_bytes} bytes")
    delta.apply(part, blob, stream.cpu())
