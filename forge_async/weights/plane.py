"""Publishing and reading versions over a store: shards first, then the manifest, old versions deleted when unread.

Keys are `<version>/shard/<rank>`, `<version>/part/<rank>` and `<version>/manifest`, always fresh: a version never
changes. What all versions share is under `layout/<id>`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import SCHEMA, Layout, Manifest, Part, build_layout
from forge_async.weights.packing import check_blob, digests
from forge_async.weights.ports import WeightStore
from forge_async.weights.reshard import TransferPlan

MANIFEST, SHARD = "/manifest", "/shard/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedPart:
    """What a rank puts beside its blob."""

    part_id: str
    digests: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A manifest as it is stored: the layout by the ids of its parts."""

    part_ids: tuple[str, ...]
    digests: bytes
    kind: str
    schema: int


_Held = tuple[Manifest, dict[int, Any]]
"""A version: its manifest, and the blob of each rank that has one."""


class WeightPlane:
    """The life of versions, seen from one process."""

    def __init__(self, store: WeightStore, *, checksums: bool = True) -> None:
        """`checksums`: whether shards are hashed when staged, and compared when read."""
        self.store = store
        self._checksums = checksums
        self._put_parts: set[str] = set()
        self._staged: dict[int, tuple[PolicyVersion, _StagedPart]] = {}
        """What was staged from here last, by rank: it need not be read back."""
        self._ranks: tuple[int, ...] | None = None
        """Which ranks held a blob of the version read last: the next one's are probably the same."""
        self._layouts: dict[tuple[str, ...], Layout] = {}

    async def stage(self, version: PolicyVersion, part: Part, blob: Any) -> None:
        """Put one rank's shards. Invisible to readers until the manifest is committed."""
        hashed = await asyncio.to_thread(digests, part, blob) if self._checksums else b""
        staged = _StagedPart(part_id=part.id, digests=hashed)
        items: dict[str, Any] = {} if part.id in self._put_parts else {f"layout/{part.id}": part}
        items |= {f"{version}{SHARD}{part.rank}": blob} if part.blob_bytes else {}
        await self.store.put(items | {f"{version}/part/{part.rank}": staged})
        self._put_parts.add(part.id)
        self._staged[part.rank] = (version, staged)

    async def commit(self, version: PolicyVersion, num_ranks: int = 1) -> Manifest:
        """Make a version readable. Call once, after every rank has staged.

        Raises WeightsError when a rank has not, or when what they staged does not form whole parameters.
        """
        parts = await self._staged_parts(version, num_ranks)
        layout = await self._layout(version, tuple(part.part_id for part in parts))
        hashed = b"".join(part.digests for part in parts)
        manifest = Manifest(version=version, layout=layout, digests=hashed)
        record = _Record(part_ids=layout.ids, digests=hashed, kind=manifest.kind, schema=manifest.schema)
        await self.store.put({f"{version}{MANIFEST}": record})
        return manifest

    async def _staged_parts(self, version: PolicyVersion, num_ranks: int) -> list[_StagedPart]:
        """What each rank staged, in order of rank."""
        found = {rank: part for rank, (staged, part) in self._staged.items() if staged == version}
        others = [rank for rank in range(num_ranks) if rank not in found]
        if others:
            try:
                async with self.store.reading([f"{version}/part/{rank}" for rank in others]) as parts:
                    found |= dict(zip(others, parts, strict=True))
            except KeyError as error:
                raise WeightsError(f"{version}: {error.args[0]} was never staged; nothing was published.") from error
        return [found[rank] for rank in range(num_ranks)]

    async def manifest(self, version: PolicyVersion) -> Manifest:
        """Raises WeightsError when the version is not there (never committed, or retired)."""
        try:
            async with self.store.reading([f"{version}{MANIFEST}"]) as [record]:
                return await self._manifest(version, record)
        except KeyError as error:
            raise WeightsError(
                f"{version} is not in the store: it was never published whole, or is already retired."
            ) from error

    async def _manifest(self, version: PolicyVersion, record: _Record) -> Manifest:
        if record.schema != SCHEMA:
            raise WeightsError(f"{version} was published by another release (schema {record.schema}, not {SCHEMA}).")
        layout = await self._layout(version, record.part_ids)
        return Manifest(version=version, layout=layout, digests=record.digests, kind=record.kind)

    @asynccontextmanager
    async def reading(
        self, version: PolicyVersion, plan_for: Callable[[Layout], TransferPlan] | None = None
    ) -> AsyncIterator[_Held]:
        """Enter to have a version's manifest and the blob of each rank, checked against the manifest's digests.

        The blobs may be the store's own memory, to be used until the exit and never written to.

        Args:
            plan_for: the plan of a reader that holds a part of the model; blobs out of which it copies nothing are not
                fetched, and shards that it does not touch not looked at.

        Raises WeightsError when the version is not there, is retired meanwhile, or arrived damaged, and what `plan_for`
        raises.
        """
        async with AsyncExitStack() as stack:
            held = await self._read_at_once(stack, version, plan_for) or await self._read_in_two(
                stack, version, plan_for
            )
            manifest, blobs = held
            if self._checksums:
                shards = None if plan_for is None else plan_for(manifest.layout).shards
                await asyncio.to_thread(_check_all, manifest, blobs, shards)
            yield manifest, blobs

    async def _read_at_once(self, stack: AsyncExitStack, version: PolicyVersion, plan_for: Any) -> _Held | None:
        """Ask for the manifest together with the blobs that it names if it is like the last one; None if it is not."""
        if (ranks := self._ranks) is None:
            return None
        keys = [f"{version}{MANIFEST}", *(f"{version}{SHARD}{rank}" for rank in ranks)]
        try:
            record, *blobs = await stack.enter_async_context(self.store.reading(keys))
        except KeyError:
            return None
        manifest = await self._manifest(version, record)
        return (manifest, dict(zip(ranks, blobs, strict=True))) if _ranks(manifest, plan_for) == ranks else None

    async def _read_in_two(self, stack: AsyncExitStack, version: PolicyVersion, plan_for: Any) -> _Held:
        manifest = await self.manifest(version)
        self._ranks = ranks = _ranks(manifest, plan_for)
        held = self.store.reading([f"{version}{SHARD}{rank}" for rank in ranks])
        try:
            blobs = await stack.enter_async_context(held)
        except KeyError as error:
            raise WeightsError(f"{version} was retired while it was read; pull a newer one.") from error
        return manifest, dict(zip(ranks, blobs, strict=True))

    async def retire(self, version: PolicyVersion) -> None:
        """Delete a version, and whatever older one was staged and never committed. Unknown versions are ignored."""
        await self.store.delete(f"{version}/")
        for old in unfinished(await self.store.keys(), before=version):
            await self.store.delete(f"{old}/")

    async def versions(self) -> list[PolicyVersion]:
        """Readable versions, oldest first."""
        keys = await self.store.keys()
        return sorted(PolicyVersion.parse(key.removesuffix(MANIFEST)) for key in keys if key.endswith(MANIFEST))

    async def _layout(self, version: PolicyVersion, part_ids: tuple[str, ...]) -> Layout:
        if part_ids not in self._layouts:
            try:
                async with self.store.reading([f"layout/{part_id}" for part_id in part_ids]) as parts:
                    self._layouts[part_ids] = build_layout(version, parts)
            except KeyError as error:
                raise WeightsError(
                    f"{version}: the store has lost {error.args[0]}; publish a newer version."
                ) from error
        return self._layouts[part_ids]


def unfinished(keys: Sequence[str], before: PolicyVersion) -> set[PolicyVersion]:
    """Versions older than `before`, of the same policy, of which parts were staged but no manifest is there."""
    staged = {PolicyVersion.parse(key.partition("/")[0]) for key in keys if not key.startswith("layout/")}
    whole = {PolicyVersion.parse(key.removesuffix(MANIFEST)) for key in keys if key.endswith(MANIFEST)}
    return {version for version in staged - whole if version.policy == before.policy and version < before}


def _ranks(manifest: Manifest, plan_for: Callable[[Layout], TransferPlan] | None) -> tuple[int, ...]:
    """Whose blobs a reader needs."""
    return manifest.ranks if plan_for is None else plan_for(manifest.layout).ranks


def _check_all(manifest: Manifest, blobs: dict[int, Any], shards: Collection[int] | None) -> None:
    for rank, blob in blobs.items():
        check_blob(manifest, rank, blob, shards)
