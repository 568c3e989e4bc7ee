"""What every transport promises: the store in memory that unit tests use, and those of `weights.transport`."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytest_asyncio
import torch

from forge_async.core.errors import DeltaError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.chains import DeltaWriter
from forge_async.weights.packing import LocalShard, Packer, pack, unpack
from forge_async.weights.plane import WeightPlane
from forge_async.weights.segments import Segment
from forge_async.weights.settings import WeightsSettings
from forge_async.weights.transports import BUILT, IPC
from tests.fakes import MemoryStore

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
ON_CPU = [pytest.param(name, marks=pytest.mark.stack) for name in ("far", *BUILT) if name != "ipc"]
KINDS = ["memory", *ON_CPU, pytest.param("ipc", marks=[pytest.mark.stack, pytest.mark.gpu])]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def backend(request, tmp_path_factory):
    """(store, a second client of it) that the module's tests share; a real store is in a process of its own."""
    if request.param == "memory":
        store = MemoryStore()
        yield store, store
        return
    before = shared_memory_files()
    actor, clients = await start(request.param, tmp_path_factory.mktemp("store"))
    assert clients[0].transport.name == request.param
    yield clients
    for client in clients:
        await client.close()
    await actor.shutdown()
    assert shared_memory_files() == before


async def start(kind, folder):
    """A store in a process of its own, and two clients of it."""
    if kind == "far":
        return await start_far(folder)
    from forge_async.actors.store_actor import StoreActor
    from forge_async.backends.weight_stores import open_store

    settings = WeightsSettings(transport=kind, rdma_backend="tcp")
    actor = await StoreActor.options(mesh_name="store", shared_gpus=settings.gpus).as_actor(
        settings, str(folder / "weights")
    )
    handle = await actor.handle.call_one(timeout_s=60)
    return actor, (open_store(handle), open_store(handle))


async def start_far(folder):
    """The same with segments that are as a GPU's are to the code around them."""
    from forge_async.backends.torchstore_store import MappedStore
    from tests.far_memory import FileAccess
    from tests.monarch.weight_ends import FarStore

    actor = await FarStore.options(mesh_name="store").as_actor(str(folder))
    address = await actor.address.call_one(timeout_s=60)
    transport = replace(IPC, name="far")
    return actor, tuple(MappedStore(address, 120.0, transport, FileAccess()) for _ in range(2))


def shared_memory_files():
    """Named segments of this machine that are ours."""
    return {path.name for path in Path("/dev/shm").glob("forge_async*")}


@pytest_asyncio.fixture(loop_scope="module")
async def store(backend):
    """The store, emptied."""
    await backend[0].delete("")
    return backend[0]


async def get(store, key):
    """A copy of what is stored."""
    async with store.reading([key]) as [value]:
        return value.cpu().clone() if isinstance(value, torch.Tensor) else value


def same(held, wanted):
    """Whether two tensors are equal, wherever they lie."""
    return torch.equal(held.cpu(), wanted.cpu())


def blob(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_bytes", [1, 64, 4097, 3 << 20])
async def test_bytes_come_back_as_they_were_put(store, num_bytes):
    await store.put({"a/shard/0": blob(num_bytes)})
    assert torch.equal(await get(store, "a/shard/0"), blob(num_bytes))
    assert await store.keys() == ["a/shard/0"]


@pytest.mark.parametrize("num_bytes", [1, 4097, 3 << 20])
async def test_memory_of_the_store_is_filled_and_put(store, num_bytes):
    mine = await store.reserve(num_bytes)
    assert (mine.numel(), mine.dtype) == (num_bytes, torch.uint8)
    mine.copy_(blob(num_bytes, seed=3))
    await store.put({"a": mine, "b": ("small", 1)})
    assert torch.equal(await get(store, "a"), blob(num_bytes, seed=3))
    assert await get(store, "b") == ("small", 1)


async def test_memory_that_was_put_last_is_not_lent_before_something_else_is_put(store):
    """Its writer may read it, should the store die."""
    last = None
    for seed in range(4):
        mine = await store.reserve(1 << 20)
        mine.copy_(blob(1 << 20, seed=seed))
        assert last is None or same(last, blob(1 << 20, seed=seed - 1))
        await store.put({f"v{seed}": mine})
        await store.delete(f"v{seed - 1}")
        last = mine


async def test_another_client_reads_what_this_one_put(backend, store):
    await store.put({"a": blob(1 << 20), "b": blob(10, seed=1)})
    async with backend[1].reading(["b", "a"]) as [small, large]:
        assert same(large, blob(1 << 20))
        assert same(small, blob(10, seed=1))


async def test_a_key_put_again_has_its_new_value(store):
    for seed in range(3):
        await store.put({"a": blob(1 << 20, seed=seed)})
        assert torch.equal(await get(store, "a"), blob(1 << 20, seed=seed))


async def test_a_slow_reader_keeps_its_bytes_whatever_is_deleted_and_put_meanwhile(backend, store):
    await store.put({"v1": blob(1 << 20, seed=1)})
    async with backend[1].reading(["v1"]) as [slow]:
        await store.delete("v1")
        for seed in range(2, 8):
            await store.put({f"v{seed}": blob(1 << 20, seed=seed)})
            await store.delete(f"v{seed - 1}")
        assert same(slow, blob(1 << 20, seed=1))
    assert torch.equal(await get(store, "v7"), blob(1 << 20, seed=7))


async def test_readings_that_overlap_have_each_their_own_bytes(backend, store):
    await store.put({f"v{seed}": blob(1 << 20, seed=seed) for seed in range(4)})
    async with backend[1].reading(["v0", "v1"]) as first, backend[1].reading(["v2", "v3"]) as second:
        assert all(same(each, blob(1 << 20, seed=seed)) for seed, each in enumerate([*first, *second]))
        async with backend[1].reading(["v3", "v0"]) as third:
            assert all(same(each, blob(1 << 20, seed=seed)) for seed, each in zip((3, 0), third, strict=True))
        assert all(same(each, blob(1 << 20, seed=seed)) for seed, each in enumerate([*first, *second]))


async def test_a_blob_without_bytes_is_a_blob_too(store):
    await store.put({"a/shard/1": blob(0)})
    assert (await get(store, "a/shard/1")).numel() == 0


async def test_small_objects_travel_beside_tensors(store):
    packed, _ = pack([LocalShard(name="w", tensor=torch.ones(2, 3), global_shape=(2, 3), offsets=(0, 0))], 0)
    await store.put({"a/part": packed})
    assert await get(store, "a/part") == packed


async def test_what_is_stored_does_not_move_with_its_sender(store):
    for num_bytes in (128, 1 << 20):
        sent = blob(num_bytes)
        await store.put({"a": sent})
        sent.zero_()
        assert torch.equal(await get(store, "a"), blob(num_bytes))


async def test_a_key_that_is_not_there_is_a_key_error_with_its_name(store):
    await store.put({"a": blob(4)})
    for keys in (["never"], ["a", "never"]):
        with pytest.raises(KeyError, match="never"):
            async with store.reading(keys):
                pass
    await store.delete("a")
    with pytest.raises(KeyError):
        await get(store, "a")
    await store.delete("a")
    assert await store.keys() == []


async def test_keys_with_a_common_beginning_are_apart(store):
    await store.put({key: blob(16, seed=i) for i, key in enumerate(("p@0.1/shard/0", "p@0.10/shard/0", "p@0.1/part"))})
    await store.delete("p@0.1/")
    assert await store.keys() == ["p@0.10/shard/0"]
    assert torch.equal(await get(store, "p@0.10/shard/0"), blob(16, seed=1))


async def test_what_is_put_may_send_others_away_in_the_same_call(store):
    await store.put({key: blob(1 << 16, seed=i) for i, key in enumerate(("p@0.1/shard/0", "p@0.10/shard/0", "p@0.2"))})
    await store.put({"p@0.3/shard/0": blob(1 << 16, seed=3), "p@0.3/manifest": "whole"}, ["p@0.1/", "p@0.2", "none"])
    assert sorted(await store.keys()) == ["p@0.10/shard/0", "p@0.3/manifest", "p@0.3/shard/0"]
    assert torch.equal(await get(store, "p@0.10/shard/0"), blob(1 << 16, seed=1))
    assert torch.equal(await get(store, "p@0.3/shard/0"), blob(1 << 16, seed=3))


async def test_many_readers_and_writers_work_at_once(backend, store):
    sizes = [1000 if i % 2 else 100_000 for i in range(8)]
    await asyncio.gather(*(store.put({f"k{i}": blob(sizes[i], seed=i)}) for i in range(8)))
    got = await asyncio.gather(*(get(backend[i % 2], f"k{i % 8}") for i in range(24)))
    assert all(torch.equal(each, blob(sizes[i % 8], seed=i % 8)) for i, each in enumerate(got))


COLUMNS = 50_000


async def publish(store, version, value, num_ranks=2):
    """Two ranks with 600 kB each."""
    whole, plane = (3 * num_ranks, COLUMNS), WeightPlane(store)
    for rank in range(num_ranks):
        packer, rows = Packer(rank), torch.full((3, COLUMNS), value)
        shard = LocalShard(name="w", tensor=rows, global_shape=whole, offsets=(3 * rank, 0))
        await plane.stage(version, *packer.pack([shard], await store.reserve(rows.nbytes)))
    await plane.commit(version, num_ranks)
    return plane


async def test_a_version_travels_whole_and_is_gone_when_retired(backend, store):
    version = PolicyVersion(step=4)
    plane = await publish(store, version, 2.5)
    async with WeightPlane(backend[1]).reading(version) as (manifest, blobs):
        assert same(unpack(manifest, blobs)["w"], torch.full((6, COLUMNS), 2.5))
    assert await plane.versions() == [version]
    await plane.retire(version)
    assert [key for key in await store.keys() if not key.startswith("layout/")] == []
    with pytest.raises(WeightsError, match="not in the store"):
        async with plane.reading(version):
            pass


async def test_deltas_lead_to_the_same_bits_and_a_damaged_one_is_told_and_replaced(backend, store):
    rank, reader = Packer(0), WeightPlane(backend[1])
    plane = WeightPlane(store, deltas=DeltaWriter(anchor_every=4))
    weights = torch.randn(6, COLUMNS).bfloat16()

    async def publish_next(step):
        weights.view(-1)[step::997] += 1
        shard = LocalShard(name="w", tensor=weights, global_shape=(6, COLUMNS), offsets=(0, 0))
        blob = await plane.memory(rank.blob_bytes)
        await plane.stage(PolicyVersion(step=step), *rank.pack([shard], blob))
        return await plane.commit(PolicyVersion(step=step))

    async def read(step):
        async with reader.reading(PolicyVersion(step=step)) as (manifest, blobs):
            assert same(unpack(manifest, blobs)["w"].view(torch.int16), weights.view(torch.int16))
        return reader.last_read.num_bytes

    for step in range(6):
        manifest = await publish_next(step)
        assert manifest.kind == ("full" if step % 4 == 0 else "delta")
        assert (await read(step) < 0.05 * manifest.num_bytes) == (manifest.kind == "delta")
    await publish_next(6)
    key = f"{PolicyVersion(step=6)}/delta/0"
    damaged = await get(store, key)
    damaged[-1] ^= 1
    await store.put({key: damaged})
    with pytest.raises(DeltaError, match=r"policy@0\.6 cannot be rebuilt .* is damaged"):
        await read(6)
    await plane.restage(PolicyVersion(step=6))
    assert (await plane.commit(PolicyVersion(step=6))).kind == "full"
    assert await read(6) > 0.9 * weights.nbytes
    await publish_next(7)
    assert await read(7) < 0.05 * weights.nbytes


async def test_over_two_hundred_versions_keys_bytes_and_memory_stay_flat(backend, store):
    counts, memory = set(), []
    for step in range(200):
        plane = await publish(store, PolicyVersion(step=step), float(step))
        async with WeightPlane(backend[1]).reading(PolicyVersion(step=step)) as (manifest, blobs):
            assert unpack(manifest, blobs)["w"].unique().tolist() == [float(step)]
        await plane.retire(PolicyVersion(step=step - 2))
        counts.add(len(await store.keys()))
        memory.append(resident_bytes())
    assert counts - {7, 12} == set()
    assert [version.step for version in await plane.versions()] == [198, 199]
    assert memory[-1] - memory[50] < 60 << 20, "versions that stay would be 180 MB; calls cost some kB each"
    if hasattr(store, "held_bytes"):
        assert await store.held_bytes() <= 3 * 2 * (600_000 + 4096)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("backend", [pytest.param("rdma", marks=pytest.mark.stack)], indirect=True, scope="module")
async def test_a_client_uses_its_memory_again_and_so_need_not_register_it_for_each_version(backend, store):
    written, read = set(), set()
    for seed in range(6):
        mine = await store.reserve(1 << 20)
        written.add(mine.data_ptr())
        await store.put({"a": mine.copy_(blob(1 << 20, seed=seed))})
        async with backend[1].reading(["a"]) as [value]:
            read.add(value.data_ptr())
            assert same(value, blob(1 << 20, seed=seed))
    assert len(written) == 2, "in turn: what was put last stays, should the store die"
    assert len(read) == 2, "the last one is still at hand when the next one comes"


@pytest.mark.stack
async def test_a_lease_is_given_back_when_what_was_begun_with_it_is_done_and_not_before():
    from forge_async.actors.liveness import Process
    from forge_async.backends.torchstore_store import MappedStore, SegmentBuffer, StoreAddress, _Answer

    events, segment = [], Segment(id=7, num_bytes=4096, address="")

    async def get_many(keys, reader, hold_s):
        return _Answer(buffers=[SegmentBuffer(segment, 10)], live=frozenset({7}))

    volume = SimpleNamespace(
        get_many=SimpleNamespace(call_one=get_many),
        release=SimpleNamespace(broadcast=lambda ids, reader: events.append(("released", ids))),
    )
    access = SimpleNamespace(
        open=lambda segment, writable: torch.zeros(segment.num_bytes, dtype=torch.uint8),
        settle=lambda: events.append("settled"),
    )
    client = MappedStore(StoreAddress(volume=volume, process=Process.current()), 10.0, IPC, access)
    async with client.reading(["a"]) as [value]:
        assert value.tolist() == [0] * 10
        assert events == []
    assert events == ["settled", ("released", [7])]
    await client.close()
