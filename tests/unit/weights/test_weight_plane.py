import asyncio

import pytest
import torch

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import build_manifest
from forge_async.weights.packing import LocalShard, pack
from forge_async.weights.plane import WeightPlane
from tests.fakes import MemoryStore


def parts_of(step, num_ranks=2):
    """What each rank packs of the model of `step`: rows of one parameter."""
    rows = (LocalShard(name="w", tensor=torch.full((1, 4), step), global_shape=(num_ranks, 4), offsets=(rank, 0))
            for rank in range(num_ranks))  # fmt: skip
    return [pack([shard], rank) for rank, shard in enumerate(rows)]


async def publish(plane, step, num_ranks=2, incarnation=0):
    version = PolicyVersion(step=step, incarnation=incarnation)
    parts = parts_of(step, num_ranks)
    for rank, (_, blob) in enumerate(parts):
        await plane.stage(version, rank, blob)
    await plane.commit(build_manifest(version, [shards for shards, _ in parts]))
    return version


async def test_a_version_is_read_as_it_was_published():
    plane = WeightPlane(MemoryStore())
    version = await publish(plane, 4)
    manifest, blobs = await plane.read(version)
    assert manifest.version == version
    assert {rank: torch.equal(blob, parts_of(4)[rank][1]) for rank, blob in blobs.items()} == {0: True, 1: True}


async def test_a_version_that_was_never_published_is_named():
    with pytest.raises(WeightsError, match=r"policy@0\.4 is not in the store"):
        await WeightPlane(MemoryStore()).read(PolicyVersion(step=4))


async def test_staged_shards_without_a_manifest_are_invisible():
    plane = WeightPlane(MemoryStore())
    await plane.stage(PolicyVersion(step=1), 0, parts_of(1)[0][1])
    assert await plane.versions() == []
    with pytest.raises(WeightsError):
        await plane.read(PolicyVersion(step=1))


async def test_a_damaged_shard_is_noticed_by_its_reader():
    store = MemoryStore()
    plane = WeightPlane(store)
    version = await publish(plane, 4)
    store.data[f"{version}/shard/1"][0] ^= 1
    with pytest.raises(WeightsError, match="w arrived damaged"):
        await plane.read(version)


async def test_the_manifest_goes_first_when_a_version_is_retired():
    store = MemoryStore()
    plane = WeightPlane(store)
    version = await publish(plane, 4)
    await plane.retire(version)
    deletions = [key for name, key in store.operations if name == "delete"]
    assert deletions[0] == f"{version}/manifest"
    assert len(deletions) == 3
    assert store.data == {}
    await plane.retire(version)


async def test_retiring_a_version_leaves_those_with_longer_numbers():
    plane = WeightPlane(MemoryStore())
    for step, incarnation in ((1, 0), (10, 0), (1, 1)):
        await publish(plane, step, incarnation=incarnation)
    await plane.retire(PolicyVersion(step=1))
    assert [str(version) for version in await plane.versions()] == ["policy@0.10", "policy@1.1"]


async def test_a_reader_whose_version_is_retired_meanwhile_is_told_so():
    store = MemoryStore()
    plane = WeightPlane(store)
    version = await publish(plane, 4)
    reading = asyncio.create_task(plane.read(version))
    while ("get", f"{version}/shard/0") not in store.operations:  # noqa: ASYNC110
        await asyncio.sleep(0)
    store.data.clear()
    with pytest.raises(WeightsError, match=r"policy@0\.4 was retired while it was read"):
        await reading


async def test_two_hundred_versions_leave_as_many_keys_as_two():
    from forge_async.weights.retention import Retention

    store, retention, counts = MemoryStore(), Retention(2), []
    plane = WeightPlane(store)
    for step in range(200):
        retention.published(await publish(plane, step))
        for old in retention.take_deletable():
            await plane.retire(old)
        counts.append(len(store.data))
    assert set(counts[1:]) == {2 * 3}
