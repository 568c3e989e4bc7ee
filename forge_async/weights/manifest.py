"""The manifest: what a version of the weights consists of, and how to tell that it arrived whole (Law 5).

Names, shapes and places are the same in every version; they form a `Layout`, which is made, checked and sent once. What
differs is small: the version and a digest of each shard.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion

SCHEMA = 4
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A box of one parameter, as one learner rank holds it."""

    name: str
    """Hugging Face name of the parameter."""
    dtype: str
    """Such as "float32"."""
    global_shape: tuple[int, ...]
    """Shape of the whole parameter."""
    offsets: tuple[int, ...]
    """Where the box begins, in elements a dimension."""
    shape: tuple[int, ...]
    """Extent of the box."""
    rank: int
    """The learner rank whose blob carries it."""
    start_bytes: int
    """Where it lies in that blob."""
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the box is the whole parameter."""
        return self.shape == self.global_shape

    @property
    def start(self) -> int:
        """Where its first element lies in the blob, in elements from the blob's beginning."""
        return self.start_bytes * math.prod(self.shape) // self.num_bytes

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one to the next in the blob, a dimension: row-major."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one learner rank holds of every version: its boxes, in the order in which they lie in its blob."""

    id: str
    """Hash of all below: equal for equal parts, in any process."""
    rank: int
    shards: tuple[Shard, ...]
    blob_bytes: int
    """Size of the blob, padding included."""

    @classmethod
    def of(cls, rank: int, shards: Sequence[Shard], blob_bytes: int) -> Part:
        """Describe a rank's blob."""
        found = hashlib.blake2b(repr((SCHEMA, rank, blob_bytes)).encode(), digest_size=16)
        for shard in shards:
            found.update(repr(shard).encode())
        return cls(id=found.hexdigest(), rank=rank, shards=tuple(shards), blob_bytes=blob_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A rank's part of one version."""

    part: Part
    digests: bytes = b""
    """xxh3-64 of each shard's bytes, 8 bytes each, in the part's order; empty when nobody asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """How one rank's part of a version is stored."""

    chain: tuple[PolicyVersion, ...]
    """Versions whose blobs make it, the last of them itself: the first is stored whole, each other as a delta to the
    one before."""
    num_bytes: int
    """Of what is stored for this version."""
    num_elements: int = 0
    """Elements that were compared with the version before; 0 when it is whole."""
    num_changed: int = 0
    """Those among them whose bits differ."""

    @property
    def base(self) -> PolicyVersion | None:
        """The version that its delta changes; None when it is whole."""
        return self.chain[-2] if len(self.chain) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the learner says of a fixed text, for engines whose parameters cannot be read back (`probe.py`)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of each token after the first, in nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The parts of all ranks together: they tile every parameter exactly."""

    parts: tuple[Part, ...]
    shards: tuple[Shard, ...] = field(init=False)
    """Of all parts, in order of rank."""
    positions: dict[tuple[int, int], int] = field(init=False, compare=False, repr=False)
    """(rank, start_bytes) -> place in `shards`."""
    names: dict[str, list[Shard]] = field(init=False, compare=False, repr=False)
    """The shards of each parameter."""
    num_bytes: int = field(init=False)
    """Bytes of all shards."""

    def __post_init__(self) -> None:
        parts = tuple(sorted(self.parts, key=lambda part: part.rank))
        shards = tuple(shard for part in parts for shard in part.shards)
        names: dict[str, list[Shard]] = {}
        for shard in shards:
            names.setdefault(shard.name, []).append(shard)
        derived = {
            "parts": parts,
            "shards": shards,
            "positions": {(shard.rank, shard.start_bytes): place for place, shard in enumerate(shards)},
            "names": names,
            "num_bytes": sum(shard.num_bytes for shard in shards),
        }
        for key, value in derived.items():
            object.__setattr__(self, key, value)

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the parts, in order of rank."""
        return tuple(part.id for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One version. Written after its shards; a reader that sees it can read all of them."""

    version: PolicyVersion
    layout: Layout
    digests: bytes = b""
    """Of all shards, in the layout's order; empty when the learner made none."""
    kind: str = "full"
    """full: every parameter is in it. delta: the same, with a part of it stored as what changed. adapter: only low-rank
    adapters are in it, for the parameters of `base`."""
    base: str = ""
    """Version that holds what this one leaves out; "" when it leaves out nothing."""
    codings: tuple[Coding, ...] = ()
    """How each part is stored, in order of rank; none: all are whole."""
    deltas_follow: bool = False
    """Whether later versions may be deltas to this one, so that a reader does well to keep its bits."""
    probe: Probe | None = None
    """None where no reader needs one."""
    schema: int = SCHEMA

    @property
    def needs(self) -> frozenset[PolicyVersion]:
        """The other versions without which it cannot be read."""
        chain = frozenset(each for coding in self.codings for each in coding.chain[:-1])
        return chain | {PolicyVersion.parse(self.base)} if self.base else chain

    @property
    def stored_bytes(self) -> int:
        """What was put into the store for it."""
        return sum(coding.num_bytes for coding in self.codings) if self.codings else self.num_bytes

    @property
    def shards(self) -> tuple[Shard, ...]:
        """All shards of all ranks."""
        return self.layout.shards

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return self.layout.num_bytes

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold a blob of this version, ascending."""
        return tuple(part.rank for part in self.layout.parts if part.blob_bytes)

    @property
    def fingerprint(self) -> str:
        """Hash of all that a reader must end up with: layout and digests, and what they build on."""
        head = repr((self.layout.ids, self.base) if self.base else self.layout.ids)
        return hashlib.blake2b(head.encode() + self.digests, digest_size=16).hexdigest()

    def names(self) -> tuple[str, ...]:
        """Parameter names, sorted."""
        return tuple(sorted(self.layout.names))

    def by_name(self) -> dict[str, list[Shard]]:
        """The shards of each parameter."""
        return self.layout.names

    def digest_of(self, shard: Shard) -> int | None:
        """xxh3-64 of the shard's bytes; None when the learner made no digests."""
        if not self.digests:
            return None
        place = self.layout.positions[shard.rank, shard.start_bytes]
        return struct.unpack_from("<Q", self.digests, DIGEST_BYTES * place)[0]


def build_manifest(version: PolicyVersion, packed: Iterable[Packed]) -> Manifest:
    """Join what each rank packed. Raises like `build_layout`."""
    ranks = sorted(packed, key=lambda each: each.part.rank)
    layout = build_layout(version, [each.part for each in ranks])
    return Manifest(version=version, layout=layout, digests=b"".join(each.digests for each in ranks))


def build_layout(version: PolicyVersion, parts: Iterable[Part]) -> Layout:
    """Join the parts of all ranks and check that they tile every parameter exactly.

    Raises WeightsError naming the first parameter that is incomplete or whose ranks disagree.
    """
    layout = Layout(parts=tuple(parts))
    for name, shards in layout.names.items():
        first = shards[0]
        if any((shard.global_shape, shard.dtype) != (first.global_shape, first.dtype) for shard in shards):
            raise WeightsError(f"{version}: the ranks disagree about shape or dtype of {name}; nothing was published.")
        have, want = sum(math.prod(shard.shape) for shard in shards), math.prod(first.global_shape)
        if have != want or not all(map(_inside, shards)) or _overlap(shards):
            raise WeightsError(
                f"{version}: the shards of {name} hold {have} elements in boxes that do not tile its {want}; "
                "nothing was published."
            )
    return layout


def _inside(shard: Shard) -> bool:
    extents = zip(shard.offsets, shard.shape, shard.global_shape, strict=True)
    return all(low >= 0 and low + size <= whole for low, size, whole in extents)


def _overlap(shards: Sequence[Shard]) -> bool:
    return any(_intersect(a, b) for i, a in enumerate(shards) for b in shards[:i])


def _intersect(a: Shard, b: Shard) -> bool:
    return all(
        low_a < low_b + size_b and low_b < low_a + size_a
        for low_a, size_a, low_b, size_b in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True)
    )
