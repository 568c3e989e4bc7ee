"""The manifest: what a version of the weights consists of, and how to tell that it arrived whole (Law 5)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion

SCHEMA = 1


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
    digest: int
    """xxh3-64 of its bytes: the fingerprint of this slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All shards of one version. Written after them; a reader that sees it can read all of them."""

    version: PolicyVersion
    shards: tuple[Shard, ...]
    kind: str = "full"
    """full; later also delta and adapter."""
    schema: int = SCHEMA

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.shards)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that hold a blob of this version, ascending."""
        return tuple(sorted({shard.rank for shard in self.shards}))

    def names(self) -> tuple[str, ...]:
        """Parameter names, sorted."""
        return tuple(sorted({shard.name for shard in self.shards}))

    def by_name(self) -> dict[str, list[Shard]]:
        """The shards of each parameter."""
        found: dict[str, list[Shard]] = {}
        for shard in self.shards:
            found.setdefault(shard.name, []).append(shard)
        return found


def build_manifest(version: PolicyVersion, parts: Iterable[Sequence[Shard]]) -> Manifest:
    """Join the shards that each rank staged and check that they tile every parameter exactly.

    Raises WeightsError naming the first parameter that is incomplete or whose ranks disagree.
    """
    manifest = Manifest(version=version, shards=tuple(shard for part in parts for shard in part))
    for name, shards in manifest.by_name().items():
        first = shards[0]
        if any((shard.global_shape, shard.dtype) != (first.global_shape, first.dtype) for shard in shards):
            raise WeightsError(f"{version}: the ranks disagree about shape or dtype of {name}; nothing was published.")
        have, want = sum(math.prod(shard.shape) for shard in shards), math.prod(first.global_shape)
        if have != want or not all(map(_inside, shards)) or _overlap(shards):
            raise WeightsError(
                f"{version}: the shards of {name} hold {have} elements in boxes that do not tile its {want}; "
                "nothing was published."
            )
    return manifest


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
