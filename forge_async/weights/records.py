"""What lies in the store beside the shards: what a rank staged, and the manifest."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.weights.manifest import Coding, Manifest, Probe


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
