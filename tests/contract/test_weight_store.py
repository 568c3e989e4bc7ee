"""What every WeightStore promises: the one in memory that unit tests use, and torchstore on Monarch."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import build_manifest
from forge_async.weights.packing import LocalShard, pack, unpack
from forge_async.weights.plane import WeightPlane
from tests.fakes import MemoryStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["memory", pytest.param("torchstore", marks=pytest.mark.stack)]
)
async def backend(request):
    """A store that the module's tests share; torchstore's is in a process of its own."""
    if request.param == "memory":
        yield MemoryStore()
        return
    from forge_async.actors.store_actor import StoreActor
    from forge_async.backends.torchstore_store import TorchstoreStore

    actor = await StoreActor.options(mesh_name="store").as_actor()
    yield TorchstoreStore(await actor.handle.call_one(timeout_s=60))
    await actor.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def store(backend):
    """The store, emptied."""
    for key in await backend.keys():
        await backend.delete(key)
    return backend


def blob(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_bytes", [1, 64, 4097, 3 << 20])
async def test_bytes_come_back_as_they_were_put(store, num_bytes):
    await store.put("a/shard/0", blob(num_bytes))
    assert torch.equal(await store.get("a/shard/0"), blob(num_bytes))
    assert await store.keys() == ["a/shard/0"]


async def test_a_blob_without_bytes_is_a_blob_too(store):
    await store.put("a/shard/1", blob(0))
    assert (await store.get("a/shard/1")).numel() == 0


async def test_small_objects_travel_beside_tensors(store):
    version = PolicyVersion(policy="actor", incarnation=2, step=7)
    shards, _ = pack([LocalShard(name="w", tensor=torch.ones(2, 3), global_shape=(2, 3), offsets=(0, 0))], 0)
    manifest = build_manifest(version, [shards])
    await store.put("a/manifest", manifest)
    assert await store.get("a/manifest") == manifest


async def test_what_is_stored_moves_neither_with_its_sender_nor_with_a_reader(store):
    sent = blob(128)
    await store.put("a", sent)
    sent.zero_()
    (await store.get("a")).zero_()
    assert torch.equal(await store.get("a"), blob(128))


async def test_a_key_that_is_not_there_is_a_key_error(store):
    with pytest.raises(KeyError):
        await store.get("never")
    with pytest.raises(KeyError):
        await store.delete("never")
    await store.put("a", blob(4))
    await store.delete("a")
    with pytest.raises(KeyError):
        await store.get("a")
    with pytest.raises(KeyError):
        await store.delete("a")
    assert await store.keys() == []


async def test_keys_with_a_common_beginning_are_apart(store):
    for number, key in enumerate(("p@0.1/shard/0", "p@0.10/shard/0", "p@0.1/shard/01")):
        await store.put(key, blob(16, seed=number))
    await store.delete("p@0.1/shard/0")
    assert sorted(await store.keys()) == ["p@0.1/shard/01", "p@0.10/shard/0"]
    assert torch.equal(await store.get("p@0.10/shard/0"), blob(16, seed=1))


async def test_many_readers_and_writers_work_at_once(store):
    await asyncio.gather(*(store.put(f"k{i}", blob(1000, seed=i)) for i in range(8)))
    got = await asyncio.gather(*(store.get(f"k{i % 8}") for i in range(24)))
    assert all(torch.equal(each, blob(1000, seed=i % 8)) for i, each in enumerate(got))


async def publish(store, version, value, num_ranks=2):
    rows, whole, plane = torch.full((3, 5), value), (3 * num_ranks, 5), WeightPlane(store)
    packed = [
        pack([LocalShard(name="w", tensor=rows, global_shape=whole, offsets=(3 * rank, 0))], rank)
        for rank in range(num_ranks)
    ]
    await asyncio.gather(*(plane.stage(version, rank, each) for rank, (_, each) in enumerate(packed)))
    await plane.commit(build_manifest(version, [shards for shards, _ in packed]))
    return plane


async def test_a_version_travels_whole_and_is_gone_when_retired(store):
    version = PolicyVersion(step=4)
    plane = await publish(store, version, 2.5)
    manifest, blobs = await plane.read(version)
    assert torch.equal(unpack(manifest, blobs)["w"], torch.full((6, 5), 2.5))
    assert await plane.versions() == [version]
    await plane.retire(version)
    assert await store.keys() == []
    with pytest.raises(WeightsError, match="not in the store"):
        await plane.read(version)


async def test_versions_come_and_go_without_leaving_keys(store):
    for step in range(20):
        plane = await publish(store, PolicyVersion(step=step), float(step))
        await plane.retire(PolicyVersion(step=step - 2))
    assert len(await store.keys()) == 2 * 3
    assert [version.step for version in await plane.versions()] == [18, 19]
