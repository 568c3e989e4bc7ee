"""A learner rank's end of one weight store: what goes from its snapshots into it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from forge_async.core.versions import PolicyVersion
from forge_async.weights.adapters import is_adapter
from forge_async.weights.manifest import Manifest, Part
from forge_async.weights.plane import WeightPlane
from forge_async.weights.snapshots import Snapshots

Packed = tuple[Part, Any]


class StoreEnd:
    """Everything that is true of one store only. A store that takes the place of a dead one gets a new end, so that
    nothing of the old one is mistaken for its own: leases, deltas, the version that adapters build on."""

    def __init__(
        self,
        plane: WeightPlane,
        snapshots: Snapshots,
        *,
        num_ranks: int,
        whole: Callable[[Packed], Awaitable[Packed]] | None,
    ) -> None:
        """Args:
        plane: over this rank's client of the store.
        snapshots: what there is to publish, whichever store it goes to.
        num_ranks: of the learner.
        whole: makes a snapshot of adapters one of the whole model; None where adapters do not travel alone.
        """
        self.plane = plane
        self._snapshots, self._num_ranks, self._whole = snapshots, num_ranks, whole
        self._base = ""
        """The version here that has what is frozen, once there is one."""
        self._builds_on: dict[PolicyVersion, str] = {}
        """The base of each version that was staged from here since the last commit; "" of a whole one."""
        self._unpublished: tuple[PolicyVersion, Packed] | None = None
        """What a learner of one rank has staged, and puts with the manifest."""

    async def stage(self, version: PolicyVersion) -> None:
        """Put a snapshot. A learner of one rank leaves it to `commit`, which puts all of it in one call to the
        store, and stages it too where that was not done before.

        Raises LearnerError when there is no such snapshot.
        """
        packed = await self._packed(version, await asyncio.wrap_future(self._snapshots.take(version)))
        if self._num_ranks > 1:
            await self.plane.stage(version, *packed)
        else:
            self._unpublished = (version, packed)

    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Manifest:
        """Make a version readable that all ranks have staged, then delete those of `retire`. Called on one rank, which
        stages it itself if it is the only one. Raises LearnerError when there is no such snapshot."""
        if self._num_ranks == 1 and not self._is_staged(version):
            await self.stage(version)
        # Kept until a later one is committed: a version may be staged and committed once more.
        self._builds_on = {each: on for each, on in self._builds_on.items() if each >= version}
        base = self._builds_on.get(version, "")
        probe = self._snapshots.probe(version)
        if self._unpublished is None or self._unpublished[0] != version:
            return await self.plane.commit(version, self._num_ranks, base, probe, retire)
        (_, packed), self._unpublished = self._unpublished, None
        return await self.plane.publish(version, *packed, base, probe, retire)

    async def close(self) -> None:
        """Leave the store. What is under way fails."""
        await self.plane.store.close()

    def _is_staged(self, version: PolicyVersion) -> bool:
        waits = self._unpublished is not None and self._unpublished[0] == version
        return waits or self.plane.has_staged(version)

    async def _packed(self, version: PolicyVersion, packed: Packed) -> Packed:
        """What is staged of a snapshot: of adapters alone only where the store has what lies below them."""
        alone = self._whole is not None and all(is_adapter(shard.name) for shard in packed[0].shards)
        if self._whole is not None and alone and not self._base:
            packed, alone = await self._whole(packed), False
        self._builds_on[version] = self._base if alone else ""
        if not alone:
            self._base = str(version)
        return packed
