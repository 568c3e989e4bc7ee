"""Publishing and reading versions over a store: shards first, then the manifest, old versions deleted when unread.

Keys are `<version>/shard/<rank>` or `<version>/delta/<rank>`, `<version>/part/<rank>` and `<version>/manifest`, always
fresh: a version never changes. What all versions share is under `layout/<id>`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from forge_async.core.errors import DeltaError, WeightsError
from forge_async.core.threads import to_thread_and_back
from forge_async.core.versions import PolicyVersion
from forge_async.weights.chains import SHARD, DeltaWriter, Held, Published, Wanted, encode, rebuild, wanted
from forge_async.weights.manifest import SCHEMA, Coding, Layout, Manifest, Part, Probe, build_layout
from forge_async.weights.packing import digests
from forge_async.weights.ports import WeightStore
from forge_async.weights.records import MANIFEST, ManifestRecord, ReadReport, StagedPart, record_of, unfinished
from forge_async.weights.reshard import TransferPlan

_Read = tuple[Manifest, list[tuple[Wanted, Any]]]
"""A version: its manifest, and what was read for it."""


class WeightPlane:
    """The life of versions, seen from one process."""

    def __init__(self, store: WeightStore, *, checksums: bool = True, deltas: DeltaWriter | None = None) -> None:
        """Args:
        store: this process's client.
        checksums: whether shards are hashed when staged, and compared when read.
        deltas: makes what is staged from here a delta where that is smaller; None: every version is whole. Readers
            need nothing: the manifest says how a version is stored.
        """
        self.store = store
        self.last_read = ReadReport()
        """Of the last version that was read whole."""
        self.plan_for: Callable[[Layout], TransferPlan] | None = None
        """The plan of a reader that holds a part of the model: blobs out of which it copies nothing are not read, and
        shards that it does not touch not looked at. None: all is read."""
        self._checksums, self._deltas = checksums, deltas
        self._put_parts: set[str] = set()
        self._staged: dict[int, tuple[PolicyVersion, StagedPart]] = {}
        """What was staged from here last, by rank: it need not be read back."""
        self._committed: PolicyVersion | None = None
        self._expected: list[tuple[int, bool]] | None = None
        """(rank, whether it was a delta) of what made the version read last: the next one's is probably the same."""
        self._held: Held | None = None
        """The version read last, where deltas to it may follow."""
        self._layouts: dict[tuple[str, ...], Layout] = {}

    async def memory(self, num_bytes: int) -> Any:
        """Memory for the next snapshot, uint8 [num_bytes], or None when new memory is as good.

        With deltas it is this process's own, since what was staged last must stay as it is; without, the store's.
        """
        if self._deltas is not None:
            return self._deltas.take_memory(num_bytes)
        return await self.store.reserve(num_bytes) if self.store.transport.lends_memory else None

    async def stage(self, version: PolicyVersion, part: Part, blob: Any, *, whole: bool = False) -> None:
        """Put one rank's shards. Invisible to readers until the manifest is committed.

        The blob belongs to the plane from then on. With deltas it must not be memory that the store lent.
        """
        staged, items = await self._staging(version, part, blob, whole=whole)
        await self.store.put(items)
        self._note_staged(version, part, blob, staged)

    async def publish(
        self,
        version: PolicyVersion,
        part: Part,
        blob: Any,
        base: str = "",
        probe: Probe | None = None,
        retire: Sequence[PolicyVersion] = (),
    ) -> Manifest:
        """Stage and commit a version of which one rank holds everything, in one call to the store.

        Raises WeightsError as `commit`, whose `base`, `probe` and `retire` these are.
        """
        await self._check_base(version, base)
        if (part.id,) not in self._layouts:
            self._layouts[part.id,] = build_layout(version, [part])
        staged, items = await self._staging(version, part, blob)
        manifest = self._manifest_of(version, self._layouts[part.id,], [staged], base, probe)
        await self._make_readable(manifest, items, retire)
        self._note_staged(version, part, blob, staged)
        return manifest

    async def _staging(
        self, version: PolicyVersion, part: Part, blob: Any, *, whole: bool = False
    ) -> tuple[StagedPart, dict[str, Any]]:
        """What says how a part is stored, and all that is to be put for it, in order."""
        hashed = await asyncio.to_thread(digests, part, blob) if self._checksums else b""
        items: dict[str, Any] = {} if part.id in self._put_parts else {f"layout/{part.id}": part}
        coding, stream = (None, None) if whole else await self._delta(version, part, blob)
        if coding is None:
            coding = Coding(chain=(version,), num_bytes=part.blob_bytes)
            items |= {f"{version}{SHARD}{part.rank}": blob} if part.blob_bytes else {}
        else:
            items[Wanted(part.rank, version, is_delta=True).key] = stream
        staged = StagedPart(part_id=part.id, digests=hashed, coding=coding)
        return staged, items | {f"{version}/part/{part.rank}": staged}

    def has_staged(self, version: PolicyVersion) -> bool:
        """Whether it is what was put from here last."""
        return any(staged == version for staged, _ in self._staged.values())

    def _note_staged(self, version: PolicyVersion, part: Part, blob: Any, staged: StagedPart) -> None:
        self._put_parts.add(part.id)
        self._staged[part.rank] = (version, staged)
        if self._deltas is not None:
            self._deltas.note(Published(version=version, part=part, blob=blob, chain=staged.coding.chain))

    async def _delta(self, version: PolicyVersion, part: Part, blob: Any) -> tuple[Coding | None, Any]:
        """How to store a part as what changed, and the delta; nothing where it is better stored whole."""
        base = self._deltas.base(version, part) if self._deltas is not None else None
        if base is None or not await self._is_ready(base.version):
            return None, None
        found = await asyncio.to_thread(encode, base, part, blob)
        if found is None:
            return None, None
        coding = Coding(
            chain=(*base.chain, version),
            num_bytes=found.stream.numel(),
            num_elements=found.num_elements,
            num_changed=found.num_changed,
        )
        return coding, found.stream

    async def _is_ready(self, version: PolicyVersion) -> bool:
        """Whether a version was committed and is still there."""
        if version == self._committed:
            return True
        try:
            async with self.store.reading([f"{version}{MANIFEST}"]):
                return True
        except KeyError:
            return False

    async def restage(self, version: PolicyVersion) -> None:
        """Stage whole what was staged from here last, beside its delta; committing again makes it readable so.

        Raises WeightsError when something else was staged last.
        """
        ranks = [rank for rank, (staged, _) in self._staged.items() if staged == version]
        for rank in ranks:
            last = self._deltas.last(rank) if self._deltas is not None else None
            if last is not None and last.version == version:
                await self.stage(version, last.part, last.blob, whole=True)
                continue
            raise WeightsError(f"{version} cannot be staged anew: its bits are not kept, since deltas are off.")
        if not ranks:
            raise WeightsError(f"{version} cannot be staged anew: it is not what was staged last.")

    async def commit(
        self,
        version: PolicyVersion,
        num_ranks: int = 1,
        base: str = "",
        probe: Probe | None = None,
        retire: Sequence[PolicyVersion] = (),
    ) -> Manifest:
        """Make a version readable. Call once, after every rank has staged.

        Args:
            version: what was staged.
            num_ranks: so many ranks have staged it.
            base: the version whose other parameters it leaves as they are; "": it has all of them.
            probe: what the learner says of the probe, where readers need one.
            retire: versions that are then deleted, newest first, with what was staged before and never committed.

        Raises WeightsError when a rank has not staged, when what they staged does not form whole parameters, or when
        the base is not readable.
        """
        await self._check_base(version, base)
        parts = await self._staged_parts(version, num_ranks)
        layout = await self._layout(version, tuple(part.part_id for part in parts))
        manifest = self._manifest_of(version, layout, parts, base, probe)
        await self._make_readable(manifest, {}, retire)
        if retire:
            await self._forget_unfinished(retire[0])
        return manifest

    async def _make_readable(
        self, manifest: Manifest, items: Mapping[str, Any], retire: Sequence[PolicyVersion]
    ) -> None:
        """Put a manifest, behind what belongs to it and before older versions are deleted, in one call to the store."""
        version = manifest.version
        await self.store.put({**items, f"{version}{MANIFEST}": record_of(manifest)}, [f"{old}/" for old in retire])
        self._committed = version

    def _manifest_of(
        self, version: PolicyVersion, layout: Layout, parts: Sequence[StagedPart], base: str, probe: Probe | None
    ) -> Manifest:
        return Manifest(
            version=version,
            layout=layout,
            digests=b"".join(part.digests for part in parts),
            kind="adapter" if base else "delta" if any(part.coding.base for part in parts) else "full",
            base=base,
            codings=tuple(part.coding for part in parts),
            deltas_follow=self._deltas is not None,
            probe=probe,
        )

    async def _check_base(self, version: PolicyVersion, base: str) -> None:
        if base and not await self._is_ready(PolicyVersion.parse(base)):
            raise WeightsError(f"{version} builds on {base}, which is not in the store; publish a whole version.")

    async def _staged_parts(self, version: PolicyVersion, num_ranks: int) -> list[StagedPart]:
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

    async def _manifest(self, version: PolicyVersion, record: ManifestRecord) -> Manifest:
        if record.schema != SCHEMA:
            raise WeightsError(f"{version} was published by another release (schema {record.schema}, not {SCHEMA}).")
        layout = await self._layout(version, record.part_ids)
        return Manifest(
            version=version,
            layout=layout,
            digests=record.digests,
            kind=record.kind,
            base=record.base,
            codings=record.codings,
            deltas_follow=record.deltas_follow,
            probe=record.probe,
        )

    @asynccontextmanager
    async def reading(self, version: PolicyVersion) -> AsyncIterator[tuple[Manifest, dict[int, Any]]]:
        """Enter to have a version's manifest and the blob of each rank, checked against the manifest's digests.

        The blobs may be the store's own memory, to be used until the exit and never written to.
        Raises WeightsError when the version is not there, is retired meanwhile, or arrived damaged; DeltaError when
        its deltas do not lead to it, which publishing it whole mends.
        """
        async with AsyncExitStack() as stack:
            manifest, blobs = await self._rebuilt(stack, version)
            try:
                yield manifest, blobs
            finally:
                if manifest.deltas_follow:
                    self._held = Held.of(manifest, blobs)

    async def _rebuilt(self, stack: AsyncExitStack, version: PolicyVersion) -> tuple[Manifest, dict[int, Any]]:
        """A version, from what is held if that leads to it, else from the last whole one."""
        held, self._held = self._held, None  # nobody else may use it: deltas are applied where it lies
        try:
            found = await self._read(stack, version, held)
        except BaseException:  # a cancelled read too: what is held is untouched, and good for the next one
            self._held = held
            raise
        try:
            return found[0], await self._put_together(found, held)
        except DeltaError as error:
            if held is None:
                raise
            damage = str(error)
        found = await self._read(stack, version, None)
        return found[0], await self._put_together(found, None, damage)

    async def _put_together(self, found: _Read, held: Held | None, damage: str = "") -> dict[int, Any]:
        manifest, fetched = found
        is_shared = self.store.transport.is_shared
        copies = is_shared and (manifest.kind == "delta" or manifest.deltas_follow)
        warm = held.blobs if held is not None else {}

        def own(rank: int, blob: Any) -> Any:
            if not copies:
                return blob
            fits = rank in warm and warm[rank].shape == blob.shape
            return warm[rank].copy_(blob) if fits else blob.to("cpu", copy=True)

        unchecked = dataclasses.replace(manifest, digests=manifest.digests if self._checksums else b"")
        shards = None if self.plan_for is None else self.plan_for(manifest.layout).shards
        blobs = await to_thread_and_back(rebuild, unchecked, fetched, held, own, shards)
        num_bytes = sum(value.numel() for _, value in fetched)
        kept = not any(not link.is_delta for link, _ in fetched)  # put together in memory of an earlier version
        self.last_read = ReadReport(
            num_bytes=num_bytes,
            own_bytes=(0 if is_shared else num_bytes)
            + (sum(blob.numel() for blob in blobs.values()) if copies or kept else 0),
            num_deltas=sum(link.is_delta for link, _ in fetched),
            transport=self.store.carried_by,
            damage=damage,
        )
        return blobs

    async def _read(self, stack: AsyncExitStack, version: PolicyVersion, held: Held | None) -> _Read:
        return await self._read_at_once(stack, version, held) or await self._read_in_two(stack, version, held)

    async def _read_at_once(self, stack: AsyncExitStack, version: PolicyVersion, held: Held | None) -> _Read | None:
        """Ask for the manifest together with what it names if it is like the last one; None if it is not."""
        if self._expected is None:
            return None
        links = [Wanted(rank, version, is_delta) for rank, is_delta in self._expected]
        try:
            record, *values = await stack.enter_async_context(
                self.store.reading([f"{version}{MANIFEST}", *(link.key for link in links)])
            )
        except KeyError:
            return None
        manifest = await self._manifest(version, record)
        return (manifest, list(zip(links, values, strict=True))) if self._wanted(manifest, held) == links else None

    async def _read_in_two(self, stack: AsyncExitStack, version: PolicyVersion, held: Held | None) -> _Read:
        manifest = await self.manifest(version)
        links = self._wanted(manifest, held)
        self._expected = list(dict.fromkeys((link.rank, link.is_delta) for link in links if link.version == version))
        try:
            values = await stack.enter_async_context(self.store.reading([link.key for link in links]))
        except KeyError as error:
            raise WeightsError(f"{version} was retired while it was read; pull a newer one.") from error
        return manifest, list(zip(links, values, strict=True))

    def _wanted(self, manifest: Manifest, held: Held | None) -> list[Wanted]:
        """What must be read for a version by this reader."""
        links = wanted(manifest, held)
        if self.plan_for is None:
            return links
        ranks = self.plan_for(manifest.layout).ranks
        return [link for link in links if link.rank in ranks]

    async def retire(self, version: PolicyVersion) -> None:
        """Delete a version, and whatever older one was staged and never committed. Unknown versions are ignored."""
        await self.store.delete(f"{version}/")
        await self._forget_unfinished(version)

    async def _forget_unfinished(self, before: PolicyVersion) -> None:
        for old in unfinished(await self.store.keys(), before):
            await self.store.delete(f"{old}/")

    async def retire_all_but(self, keep: int) -> None:
        """Delete all versions but the newest `keep` and those that these need, newest first: none is left that needs
        a deleted one, wherever this breaks off."""
        versions = await self.versions()
        kept = {*versions[-keep:]}
        for version in versions[-keep:]:
            kept |= (await self.manifest(version)).needs
        for old in reversed(versions):
            if old not in kept:
                await self.retire(old)

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
