"""Publishing and reading versions over a store: shards first, then the manifest, old versions deleted when unread.

Keys are `<version>/shard/<rank>` and `<version>/manifest`, always fresh: a version is immutable.
"""

from __future__ import annotations

import asyncio
from typing import Any

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Manifest
from forge_async.weights.packing import check_blob
from forge_async.weights.ports import WeightStore


class WeightPlane:
    """The life of versions, seen from one process."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    async def stage(self, version: PolicyVersion, rank: int, blob: Any) -> None:
        """Put one rank's shards. Invisible to readers until the manifest is committed."""
        await self._store.put(f"{version}/shard/{rank}", blob)

    async def commit(self, manifest: Manifest) -> None:
        """Make a version readable. Call once, after every rank has staged."""
        await self._store.put(f"{manifest.version}/manifest", manifest)

    async def manifest(self, version: PolicyVersion) -> Manifest:
        """Raises WeightsError when the version is not there (never committed, or retired)."""
        try:
            return await self._store.get(f"{version}/manifest")
        except KeyError as error:
            raise WeightsError(
                f"{version} is not in the store: it was never published whole, or is already retired."
            ) from error

    async def read(self, version: PolicyVersion) -> tuple[Manifest, dict[int, Any]]:
        """Fetch a version: its manifest and the blob of each rank, checked against the manifest's digests.

        Raises WeightsError when it is not there, is retired meanwhile, or arrived damaged.
        """
        manifest = await self.manifest(version)
        try:
            blobs = await asyncio.gather(*(self._store.get(f"{version}/shard/{rank}") for rank in manifest.ranks))
        except KeyError as error:
            raise WeightsError(f"{version} was retired while it was read; pull a newer one.") from error
        for rank, blob in zip(manifest.ranks, blobs, strict=True):
            check_blob(manifest, rank, blob)
        return manifest, dict(zip(manifest.ranks, blobs, strict=True))

    async def retire(self, version: PolicyVersion) -> None:
        """Delete a version, manifest first, so that no reader can begin on half of it. Unknown versions are ignored."""
        prefix = f"{version}/"
        keys = [key for key in await self._store.keys() if key.startswith(prefix)]
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest")):
            try:
                await self._store.delete(key)
            except KeyError:
                continue

    async def versions(self) -> list[PolicyVersion]:
        """Readable versions, oldest first."""
        keys = await self._store.keys()
        return sorted(PolicyVersion.parse(key.removesuffix("/manifest")) for key in keys if key.endswith("/manifest"))
