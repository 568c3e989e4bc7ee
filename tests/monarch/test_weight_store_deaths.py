"""Deaths around the weight store: of its clients, of itself; and what is left of its memory."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import signal
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

from forge_async.actors.store_actor import StoreActor
from forge_async.core.errors import ActorDiedError, ConfigError, StallError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.packing import LocalShard, Packer, unpack
from forge_async.weights.plane import WeightPlane
from forge_async.weights.settings import WeightsSettings
from tests.monarch.weight_ends import Holder

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]
MIB = 1 << 20


def filled(value):
    return torch.full((MIB,), value, dtype=torch.uint8)


RDMA = WeightsSettings(transport="rdma", rdma_backend="tcp")


async def start_store(settings=WeightsSettings()):  # noqa: B008  frozen
    from forge_async.backends.weight_stores import open_store

    actor = await StoreActor.options(mesh_name="store").as_actor(settings)
    return actor, open_store(await actor.handle.call_one(timeout_s=60))


async def start_holder(store, transport="shm"):
    holder = await Holder.options(mesh_name="holder").as_actor()
    assert await holder.join.call_one(await store.handle.call_one()) == transport
    return holder


async def kill(actor):
    os.kill(actor.pids[0], signal.SIGKILL)
    await asyncio.wait_for(actor.watch.wait_for_death(), 10)


async def test_memory_that_a_dead_reader_or_writer_held_is_used_again_and_a_live_ones_is_not():
    actor, store = await start_store()
    holders = [await start_holder(actor) for _ in range(2)]
    await store.put({"v1": filled(1)})
    for holder in holders:
        assert await holder.hold.call_one("v1") == 1
    await holders[0].reserve.call_one(MIB)
    await store.delete("v1")
    assert await store.held_bytes() == 2 * MIB
    await kill(holders[0])
    await store.put({"v2": filled(2)})
    assert await store.held_bytes() == 2 * MIB, "the reservation of the dead came back, the lease of the living stands"
    assert await holders[1].first_bytes.call_one() == [1]
    await kill(holders[1])
    await store.put({"v3": filled(3)})
    assert await store.held_bytes() == 2 * MIB
    await store.close()
    await actor.shutdown()


def test_rdma_without_hardware_is_refused_and_never_goes_over_sockets_by_itself():
    from monarch.rdma import get_rdma_backend, is_ibverbs_available

    from forge_async.backends.rdma_store import use_backend

    if is_ibverbs_available():
        pytest.skip("this machine has RDMA hardware")
    use_backend("tcp")
    assert get_rdma_backend() == "tcp"
    with pytest.raises(ConfigError, match=r"^weights\.rdma_backend=ibverbs needs .* weights\.rdma_backend=tcp"):
        use_backend("ibverbs")
    assert get_rdma_backend() == "none"


async def test_a_dead_reader_of_this_host_holds_nothing_over_rdma_either():
    actor, store = await start_store(RDMA)
    holder = await start_holder(actor, "rdma")
    await store.put({"v1": filled(1)})
    await holder.lease.call_one("v1")
    await store.delete("v1")
    await store.put({"v2": filled(2)})
    assert await store.held_bytes() == 2 * MIB, "the lease of the living stands"
    await kill(holder)
    await store.put({"v3": filled(3)})
    assert await store.held_bytes() == 2 * MIB
    await store.close()
    await actor.shutdown()


async def test_a_client_whose_death_cannot_be_seen_holds_memory_for_its_time_only_and_spoils_nobodys_when_it_wakes():
    """As one on another host: it holds for `weights.timeout_s`, then its registration ends with its memory."""
    from monarch.rdma import RDMAAction
    from torchstore.transport.pipe import Request

    from forge_async.backends.rdma_store import RdmaStore
    from forge_async.backends.torchstore_store import SegmentBuffer

    actor, store = await start_store(RDMA)
    late = RdmaStore(cloudpickle.loads(await actor.handle.call_one()).address)
    late._own, late._hold_s = dataclasses.replace(late._own, machine="elsewhere/0"), 4.0
    await store.put({"v1": filled(1)})
    async with late._leasing(["v1"]) as answer:
        reserved, _ = await late._reserved(MIB)
        leased = answer.buffers[0].segment
        await store.delete("v1")
        await store.put({"v2": filled(2)})
        live = (await store._get(["v2"], None)).live
        assert {reserved.id, leased.id} <= live, "its time is not over"
        async with asyncio.timeout(30):
            while {reserved.id, leased.id} & live:
                await store.put({"v2": filled(2), "v3": filled(3)})
                live = (await store._get(["v2"], None)).live
        for action in (
            RDMAAction().write_remote(reserved.address, filled(9)),
            RDMAAction().read_remote(torch.zeros(MIB, dtype=torch.uint8), leased.address),
        ):
            with pytest.raises(Exception, match=r".+"):
                await late._submit(action)
        assert await late._volume.put_many.call_one([("v4", SegmentBuffer(reserved, MIB), Request())]) == "v4"
    late._hold_s = 0.0
    with pytest.raises(StallError, match=r"To read v2 took longer than weights\.timeout_s"):
        async with late.reading(["v2"]):
            pass
    assert sorted(await store.keys()) == ["v2", "v3"]
    async with store.reading(["v2", "v3"]) as values:
        assert [each.unique().tolist() for each in values] == [[2], [3]]
    await late.close()
    await store.close()
    await actor.shutdown()


async def test_who_leaves_a_store_that_does_not_answer_waits_for_it_no_longer():
    """As one on another host, which cannot see that it is dead: whoever can has it leave."""
    from forge_async.backends.torchstore_store import TorchstoreStore

    actor, store = await start_store()
    address = cloudpickle.loads(await actor.handle.call_one()).address
    far = TorchstoreStore(
        dataclasses.replace(address, process=dataclasses.replace(address.process, machine="elsewhere/0"))
    )
    await far.put({"v1": filled(1)})
    os.kill(actor.pids[0], signal.SIGSTOP)
    asked = asyncio.create_task(far.keys())
    done, _ = await asyncio.wait([asked], timeout=0.5)
    assert not done
    begun = time.monotonic()
    await far.close()
    with pytest.raises(ActorDiedError, match="this process has left it"):
        await asked
    with pytest.raises(ActorDiedError):
        await far.keys()
    assert time.monotonic() - begun < 1
    os.kill(actor.pids[0], signal.SIGCONT)
    assert await store.keys() == ["v1"]
    await store.close()
    await actor.shutdown()


async def test_a_process_lives_on_with_what_it_read_when_the_store_has_died():
    """Monarch returns a message to the dead to whoever sent it: giving back a lease must not be that one's end."""
    actor, store = await start_store()
    holder = await start_holder(actor)
    await store.put({"v1": filled(1)})
    assert await holder.hold.call_one("v1") == 1
    await kill(actor)
    await holder.end_reading.call_one(timeout_s=20)
    assert await holder.first_bytes.call_one(timeout_s=20) == [1]
    await store.close()
    await holder.shutdown()


async def test_memory_of_a_store_that_has_just_died_is_refused_as_such():
    """It had answered where the memory is, and nobody can be there any more."""
    from forge_async.backends.segment_memory import MemfdAccess
    from forge_async.weights.segments import Segment

    actor, store = await start_store()
    await store.put({"v1": filled(1)})
    address = f"/proc/{actor.pids[0]}/fd/{memory_files_of(actor.pids[0])[0].name}"
    segment = Segment(id=0, num_bytes=MIB, address=address)
    assert MemfdAccess().open(segment, writable=False)[0] == 1
    await kill(actor)
    with pytest.raises(WeightsError, match="its process has ended"):
        MemfdAccess().open(segment, writable=True)
    await store.close()


async def publish(plane, step):
    tensor = torch.full((MIB,), float(step))
    shard = LocalShard(name="w", tensor=tensor, global_shape=(MIB,), offsets=(0,))
    await plane.stage(PolicyVersion(step=step), *Packer(0).pack([shard], await plane.store.reserve(4 * MIB)))
    await plane.commit(PolicyVersion(step=step))


def memory_files_of(pid):
    """Descriptors of a process that are segments of the store."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found += [link] if "forge_async-weights" in str(link.readlink()) else []
    return found


@pytest.mark.parametrize("settings", [WeightsSettings(), RDMA], ids=lambda each: each.transport)
async def test_a_killed_store_is_noticed_leaves_nothing_and_is_repaired_by_publishing_to_another(settings):
    before = sorted(os.listdir("/dev/shm"))  # noqa: PTH208
    actor, store = await start_store(settings)
    plane = WeightPlane(store)
    await publish(plane, 1)
    assert memory_files_of(actor.pids[0])
    async with plane.reading(PolicyVersion(step=1)) as (manifest, blobs):
        os.kill(actor.pids[0], signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(ActorDiedError, match="store"):
            while True:
                await store.keys()
        assert time.monotonic() - begun < 5
        assert unpack(manifest, blobs)["w"].unique().tolist() == [1.0], "what a reader holds outlives the store"
    with pytest.raises(ActorDiedError):
        await publish(plane, 2)
    await store.close()
    blobs.clear()
    gc.collect()
    assert memory_files_of(os.getpid()) == [], "and nothing outlives its last reader"
    assert sorted(os.listdir("/dev/shm")) == before  # noqa: PTH208
    again, other = await start_store(settings)
    await publish(WeightPlane(other), 2)
    async with WeightPlane(other).reading(PolicyVersion(step=2)) as (manifest, blobs):
        assert unpack(manifest, blobs)["w"].unique().tolist() == [2.0]
    await again.shutdown()
