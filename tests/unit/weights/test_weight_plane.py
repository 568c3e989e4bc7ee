import asyncio

import pytest
import torch

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.packing import LocalShard, Packer, Transfer
from forge_async.weights.plane import WeightPlane
from forge_async.weights.reshard import Wanted
from tests.fakes import MemoryStore


def parts_of(step, num_ranks=2):
    """What each rank packs of the model of `step`: rows of one parameter."""
    rows = (LocalShard(name="w", tensor=torch.full((1, 4), step), global_shape=(num_ranks, 4), offsets=(rank, 0))
            for rank in range(num_ranks))  # fmt: skip
    return [Packer(rank).pack([shard]) for rank, shard in enumerate(rows)]


async def publish(plane, step, num_ranks=2, incarnation=0):
    version = PolicyVersion(step=step, incarnation=incarnation)
    for part, blob in parts_of(step, num_ranks):
        await plane.stage(version, part, blob)
    await plane.commit(version, num_ranks)
    return version


async def read(plane, version):
    async with plane.reading(version) as (manifest, blobs):
        return manifest, blobs


async def test_a_version_is_read_as_it_was_published():
    plane = WeightPlane(MemoryStore())
    version = await publish(plane, 4)
    manifest, blobs = await read(plane, version)
    assert manifest.version == version
    assert {rank: torch.equal(blob, parts_of(4)[rank][1]) for rank, blob in blobs.items()} == {0: True, 1: True}


async def test_a_version_that_was_never_published_is_named():
    with pytest.raises(WeightsError, match=r"policy@0\.4 is not in the store"):
        await read(WeightPlane(MemoryStore()), PolicyVersion(step=4))


async def test_staged_shards_without_a_manifest_are_invisible():
    plane = WeightPlane(MemoryStore())
    await plane.stage(PolicyVersion(step=1), *parts_of(1)[0])
    assert await plane.versions() == []
    with pytest.raises(WeightsError):
        await read(plane, PolicyVersion(step=1))


async def test_a_damaged_shard_is_noticed_by_its_reader():
    store = MemoryStore()
    plane = WeightPlane(store)
    version = await publish(plane, 4)
    store.data[f"{version}/shard/1"][0] ^= 1
    with pytest.raises(WeightsError, match="w arrived damaged"):
        await read(plane, version)


async def test_the_manifest_goes_first_when_a_version_is_retired():
    store = MemoryStore()
    plane = WeightPlane(store)
    version = await publish(plane, 4)
    await plane.retire(version)
    deletions = [key for name, key in store.operations if name == "delete"]
    assert deletions[0] == f"{version}/manifest"
    assert len(deletions) == 5
    assert all(key.startswith("layout/") for key in store.data)
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
    reading = asyncio.create_task(read(plane, version))
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
    assert set(counts[1:]) == {2 * 5 + 2}, "two versions of two ranks, and the layout of each rank"


async def test_a_version_that_a_rank_did_not_stage_is_not_committed():
    store = MemoryStore()
    plane = WeightPlane(store)
    await plane.stage(PolicyVersion(step=1), *parts_of(1)[0])
    with pytest.raises(WeightsError, match=r"policy@0\.1/part/1 was never staged; nothing was published"):
        await plane.commit(PolicyVersion(step=1), 2)
    assert await plane.versions() == []


async def test_what_a_dead_incarnation_staged_goes_with_the_next_version_that_is_retired():
    store = MemoryStore()
    plane = WeightPlane(store)
    await publish(plane, 1)
    await plane.stage(PolicyVersion(step=2), *parts_of(2)[0])
    await plane.stage(PolicyVersion(policy="other", step=2), *parts_of(2)[0])
    born_again = [await publish(WeightPlane(store), step, incarnation=1) for step in (1, 2)]
    await plane.stage(PolicyVersion(step=3, incarnation=1), *parts_of(3)[0])
    await plane.retire(born_again[0])
    left = {key.partition("/")[0] for key in store.data if not key.startswith("layout/")}
    assert left == {"policy@0.1", "other@0.2", "policy@1.2", "policy@1.3"}


async def test_what_another_rank_staged_and_never_committed_goes_with_a_commit_that_retires():
    store = MemoryStore()
    plane = WeightPlane(store)
    versions = [await publish(plane, step) for step in (1, 3)]
    await WeightPlane(store).stage(PolicyVersion(step=0), *parts_of(0)[1])
    await WeightPlane(store).stage(PolicyVersion(step=2), *parts_of(2)[1])
    for part, blob in parts_of(4):
        await plane.stage(PolicyVersion(step=4), part, blob)
    await plane.commit(PolicyVersion(step=4), 2, retire=versions[:1])
    left = {key.partition("/")[0] for key in store.data if not key.startswith("layout/")}
    assert left == {"policy@0.2", "policy@0.3", "policy@0.4"}, "what is older than the retired one"


async def test_the_layout_is_put_once_and_read_once():
    store = MemoryStore()
    writer, reader = WeightPlane(store), WeightPlane(store)
    for step in range(3):
        await read(reader, await publish(writer, step))
    layouts = [operation for operation in store.operations if operation[1].startswith("layout/")]
    assert [name for name, _ in layouts].count("put") == 2
    assert [name for name, _ in layouts].count("get") == 4, "once by who commits and once by who reads, for each rank"


async def test_without_checksums_nothing_is_hashed_or_compared():
    store = MemoryStore()
    plane = WeightPlane(store, checksums=False)
    version = await publish(plane, 4)
    store.data[f"{version}/shard/1"][0] ^= 1
    manifest, _ = await read(plane, version)
    assert manifest.digests == b""


async def publish_adapter(plane, step, base):
    version = PolicyVersion(step=step)
    shard = LocalShard(name="w.lora_A.weight", tensor=torch.full((1, 4), step), global_shape=(1, 4), offsets=(0, 0))
    await plane.stage(version, *Packer(0).pack([shard]))
    await plane.commit(version, 1, base=str(base))
    return version


async def test_a_version_of_adapters_names_what_it_builds_on_which_stays_readable():
    plane = WeightPlane(MemoryStore())
    base = await publish(plane, 0)
    first, second = [await publish_adapter(plane, step, base) for step in (1, 2)]
    for version in (first, second):
        manifest, _ = await read(WeightPlane(plane.store), version)
        assert (manifest.kind, manifest.base, manifest.names()) == ("adapter", str(base), ("w.lora_A.weight",))
    assert (await read(plane, base))[0].kind == "full"
    await plane.retire_all_but(1)
    assert await plane.versions() == [base, second], "it stays while something builds on it"
    await publish(plane, 3)
    await plane.retire_all_but(1)
    assert await plane.versions() == [PolicyVersion(step=3)]


async def test_adapters_for_a_version_that_is_not_there_are_not_published():
    plane = WeightPlane(MemoryStore())
    with pytest.raises(WeightsError, match=r"policy@0\.1 builds on policy@0\.0, which is not in the store"):
        await publish_adapter(plane, 1, PolicyVersion(step=0))
    assert await plane.versions() == []
    await publish(plane, 0)
    await publish_adapter(WeightPlane(plane.store), 1, PolicyVersion(step=0))


async def test_the_same_adapters_on_another_base_have_another_fingerprint():
    plane = WeightPlane(MemoryStore())
    bases = [await publish(plane, 0, incarnation=number) for number in (0, 1)]
    found = []
    for base in bases:
        await publish_adapter(plane, 5, base)
        found.append((await read(WeightPlane(plane.store), PolicyVersion(step=5)))[0].fingerprint)
    assert found[0] != found[1]


async def test_one_rank_alone_publishes_in_one_call_shards_before_the_manifest():
    store = MemoryStore()
    plane = WeightPlane(store)
    [(part, blob)] = parts_of(4, num_ranks=1)
    puts = []
    put = store.put

    async def counted(items, forget=()):
        puts.append((list(items), list(forget)))
        await put(items, forget)

    store.put = counted
    version = PolicyVersion(step=4)
    published = await plane.publish(version, part, blob, retire=[PolicyVersion(step=2), PolicyVersion(step=1)])
    keys = [f"layout/{part.id}", f"{version}/shard/0", f"{version}/part/0", f"{version}/manifest"]
    assert puts == [(keys, ["policy@0.2/", "policy@0.1/"])]
    manifest, blobs = await read(WeightPlane(store), version)
    assert (manifest, blobs[0].tolist()) == (published, blob.tolist())


async def test_one_rank_that_does_not_hold_everything_cannot_publish_alone():
    store = MemoryStore()
    part, blob = parts_of(4)[0]
    with pytest.raises(WeightsError, match="the shards of w hold 4 elements in boxes that do not tile its 8"):
        await WeightPlane(store).publish(PolicyVersion(step=4), part, blob)
    assert store.data == {}


@pytest.mark.parametrize("times", [1, 2])
async def test_a_reader_of_a_part_fetches_and_looks_at_nothing_else(times):
    """Once when nothing is known of the version before, and once more as its successor."""
    store = MemoryStore()
    plane, reader = WeightPlane(store), WeightPlane(store)
    second_row = Wanted(name="w", dtype="int64", global_shape=(2, 4), offsets=(1, 1), shape=(1, 3))
    transfer = Transfer([second_row], shared=False)
    reader.plan_for = transfer.plan_for
    for step in range(times):
        version = await publish(plane, step)
        store.data[f"{version}/shard/0"][0] ^= 1
        async with reader.reading(version) as (_, blobs):
            assert blobs.keys() == {1}
            [source] = transfer.sources(blobs)
            assert torch.equal(source, torch.full((1, 3), step))
    store.data[f"{version}/shard/1"][0] ^= 1
    with pytest.raises(WeightsError, match="w arrived damaged"):
        async with reader.reading(version):
            pass
