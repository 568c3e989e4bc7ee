"""What lies in the store beside the shards: what a rank staged, and the manifest; and what a reading took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Coding, Manifest, Probe

MANIFEST = "/manifest"
"""After a version, the key of its manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPart:
    """What a rank puts beside its blob."""

    part_id: str
    digests: bytes
    coding: Coding


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRecord:
    """A manifest as it is stored: the layout by the ids of its parts."""

    part_ids: tuple[str, ...]
    digests: bytes
    kind: str
    base: str
    codings: tuple[Coding, ...]
    deltas_follow: bool
    probe: Probe | None
    schema: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What the reading of a version took."""

    num_bytes: int = 0
    """Read from the store."""
    own_bytes: int = 0
    """Memory of this process that it is in, or was put together in."""
    num_deltas: int = 0
    transport: str = ""
    """What brought it."""
    damage: str = ""
    """Why what was held, or was read first, was given up for the last whole version and all deltas since."""

    def with_base(self, base: ReadReport) -> ReadReport:
        """The same together with the reading of a version that it builds on."""
        return ReadReport(
            num_bytes=self.num_bytes + base.num_bytes,
            own_bytes=self.own_bytes + base.own_bytes,
            num_deltas=self.num_deltas + base.num_deltas,
            transport=self.transport,
            damage=self.damage or base.damage,
        )


def record_of(manifest: Manifest) -> ManifestRecord:
    """The manifest as it is stored."""
    return ManifestRecord(
        part_ids=manifest.layout.ids,
        digests=manifest.digests,
        kind=manifest.kind,
        base=manifest.base,
        codings=manifest.codings,
        deltas_follow=manifest.deltas_follow,
        probe=manifest.probe,
        schema=manifest.schema,
    )


def unfinished(keys: Sequence[str], before: PolicyVersion) -> set[PolicyVersion]:
    """Versions older than `before`, of the same policy, of which parts were staged but no manifest is there."""
    staged = {PolicyVersion.parse(key.partition("/")[0]) for key in keys if not key.startswith("layout/")}
    whole = {PolicyVersion.parse(key.removesuffix(MANIFEST)) for key in keys if key.endswith(MANIFEST)}
    return {version for version in staged - whole if version.policy == before.policy and version < before}
