"""Deaths around the weight store: of its clients, of itself; and what is left of its memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from forge_async.actors.store_actor import StoreActor
from forge_async.core.errors import ActorDiedError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.packing import LocalShard, Packer, unpack
from forge_async.weights.plane import WeightPlane
from tests.monarch.weight_ends import Holder

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]
MIB = 1 << 20


def filled(value):
    return torch.full((MIB,), value, dtype=torch.uint8)


async def start_store():
    from forge_async.backends.weight_stores import open_store

    actor = await StoreActor.options(mesh_name="store").as_actor()
    return actor, open_store(await actor.handle.call_one(timeout_s=60))


async def start_holder(store):
    holder = await Holder.options(mesh_name="holder").as_actor()
    assert await holder.join.call_one(await store.handle.call_one()) == "shm"
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


async def test_a_killed_store_is_noticed_leaves_nothing_and_is_repaired_by_publishing_to_another():
    before = sorted(os.listdir("/dev/shm"))  # noqa: PTH208
    actor, store = await start_store()
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
    again, other = await start_store()
    await publish(WeightPlane(other), 2)
    async with WeightPlane(other).reading(PolicyVersion(step=2)) as (manifest, blobs):
        assert unpack(manifest, blobs)["w"].unique().tolist() == [2.0]
    await again.shutdown()
