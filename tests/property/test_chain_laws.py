"""Any READY version can be rebuilt, bit for bit, by a reader that comes late, missed versions, or was there all along;
wherever its writer dies, and whatever has been retired."""

import asyncio
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.core.errors import DeltaError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.chains import DeltaWriter
from forge_async.weights.packing import LocalShard, Packer, unpack
from forge_async.weights.plane import WeightPlane
from forge_async.weights.retention import Retention
from tests.fakes import MemoryStore, StoreCrashError

ROWS, COLUMNS = 5, 300
"""Of the one parameter: uneven over 2 and 3 ranks; with 7 ranks some would have none."""


def weights_of(step, noise=0.0):
    """bfloat16 [ROWS, COLUMNS]: a few elements change with each step, or (by `noise`) nearly all of them."""
    random = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step)) if noise else 0.0
    return (plain(step) + noise * random).bfloat16()


@functools.cache
def plain(step):
    if step <= 0:
        return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) / 64
    tensor, generator = plain(step - 1).clone(), torch.Generator().manual_seed(step)
    tensor.view(-1)[torch.randint(0, ROWS * COLUMNS, (9,), generator=generator)] = step + torch.arange(9) / 8
    return tensor


class Learner:
    """Ranks with a plane each, and the books of what may be deleted."""

    def __init__(self, store, num_ranks, anchor_every, keep, incarnation=0):
        self.num_ranks, self.incarnation, self.retention = num_ranks, incarnation, Retention(keep)
        self.planes = [WeightPlane(store, deltas=DeltaWriter(anchor_every)) for _ in range(num_ranks)]
        self.packers = [Packer(rank) for rank in range(num_ranks)]

    def boxes(self, rank, tensor):
        cut = [ROWS * each // self.num_ranks for each in range(self.num_ranks + 1)]
        rows = tensor[cut[rank] : cut[rank + 1]]
        return [LocalShard(name="w", tensor=rows, global_shape=(ROWS, COLUMNS), offsets=(cut[rank], 0))]

    async def publish(self, step, noise=0.0):
        version = PolicyVersion(step=step, incarnation=self.incarnation)
        superseded = self.retention.take_deletable(coming=1)
        for rank, plane in enumerate(self.planes):
            part, _ = self.packers[rank].pack(self.boxes(rank, weights_of(step, noise)))
            blob = await plane.memory(part.blob_bytes)
            packed = self.packers[rank].pack(self.boxes(rank, weights_of(step, noise)), blob)
            if self.num_ranks > 1:
                await plane.stage(version, *packed)
            else:
                manifest = await plane.publish(version, *packed, retire=superseded)
        if self.num_ranks > 1:
            manifest = await self.planes[0].commit(version, self.num_ranks, retire=superseded)
        self.retention.published(version, manifest.needs)
        return manifest

    async def retire(self):
        for old in self.retention.take_deletable():
            await self.planes[0].retire(old)


async def read(plane, version):
    async with plane.reading(version) as (manifest, blobs):
        return manifest, unpack(manifest, blobs)["w"].clone()


def same_bits(one, other):
    return torch.equal(one.view(torch.int16), other.view(torch.int16))


@settings(deadline=None, max_examples=60)
@given(
    num_ranks=st.sampled_from((1, 2, 3, 7)),
    anchor_every=st.integers(1, 5),
    keep=st.integers(1, 3),
    num_whole=st.integers(0, 7),
    noisy=st.sets(st.integers(0, 8)),
    crash_after=st.integers(0, 40),
    seen=st.sets(st.integers(0, 7)),
)
def test_every_readable_version_is_rebuilt_wherever_its_writer_dies(
    num_ranks, anchor_every, keep, num_whole, noisy, crash_after, seen
):
    async def story():
        store = MemoryStore()
        learner, faithful = Learner(store, num_ranks, anchor_every, keep), WeightPlane(store)
        noise = dict.fromkeys(noisy, 3.0)
        for step in range(num_whole):
            await learner.publish(step, noise.get(step, 0.0))
            if step in seen:
                await read(faithful, PolicyVersion(step=step))
            await learner.retire()
        store.crash_after = len(store.operations) + crash_after
        try:
            await learner.publish(num_whole, noise.get(num_whole, 0.0))
            await learner.retire()
        except StoreCrashError:
            pass
        store.crash_after = None
        ready = await WeightPlane(store).versions()
        assert len(ready) >= min(keep, num_whole)
        for version in ready:
            for plane in (WeightPlane(store), faithful):
                _, found = await read(plane, version)
                assert same_bits(found, weights_of(version.step, noise.get(version.step, 0.0)))

    asyncio.run(story())


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from(("publish", "die while staging", "retire", "read")), max_size=14), st.integers(2, 4))
def test_a_version_that_was_staged_and_never_committed_is_built_on_by_none(story_of, anchor_every):
    async def story():
        store = MemoryStore()
        learner, reader, step = Learner(store, 2, anchor_every, keep=2), WeightPlane(store), 0
        for event in ["publish", *story_of, "read"]:
            if event == "publish":
                manifest = await learner.publish(step := step + 1)
                ready = set(await reader.versions())
                assert manifest.needs <= ready
            elif event == "die while staging":
                version = PolicyVersion(step=(step := step + 1))
                part, blob = learner.packers[0].pack(learner.boxes(0, weights_of(step)))
                await learner.planes[0].stage(version, part, blob)
            elif event == "retire":
                await learner.retire()
            else:
                newest = (await reader.versions())[-1]
                assert same_bits((await read(reader, newest))[1], weights_of(newest.step))

    asyncio.run(story())


async def test_deltas_are_small_and_anchors_come_at_their_cadence():
    store = MemoryStore()
    learner, reader = Learner(store, 2, anchor_every=4, keep=2), WeightPlane(store)
    kinds, read_bytes = [], []
    for step in range(9):
        manifest = await learner.publish(step)
        kinds.append(manifest.kind)
        await read(reader, manifest.version)
        read_bytes.append(reader.last_read.num_bytes)
        await learner.retire()
        assert (manifest.kind == "delta") == (manifest.stored_bytes < manifest.num_bytes / 2)
    assert kinds == ["full", *["delta"] * 3] * 2 + ["full"]
    assert all(size < read_bytes[0] / 2 for size, kind in zip(read_bytes, kinds, strict=True) if kind == "delta")


async def test_keys_and_bytes_stay_flat_over_two_hundred_versions():
    store = MemoryStore()
    learner, keys, sizes = Learner(store, 2, anchor_every=4, keep=2), [], []
    for step in range(200):
        await learner.publish(step)
        await learner.retire()
        keys.append(len([key for key in store.data if not key.startswith("layout/")]))
        sizes.append(sum(value.numel() for value in store.data.values() if isinstance(value, torch.Tensor)))
    assert max(keys[8:]) == max(keys[:8]) == 5 * (4 + 1)
    assert max(sizes[100:]) <= 1.2 * max(sizes[8:100])


async def test_who_missed_versions_catches_up_by_the_deltas_since_and_who_comes_late_from_the_anchor():
    store = MemoryStore()
    learner, reader = Learner(store, 1, anchor_every=9, keep=9), WeightPlane(store)
    for step in range(6):
        await learner.publish(step)
    await read(reader, PolicyVersion(step=2))
    assert (reader.last_read.num_deltas, reader.last_read.num_bytes > 3000) == (2, True)
    _, found = await read(reader, PolicyVersion(step=5))
    assert (reader.last_read.num_deltas, reader.last_read.num_bytes < 1500) == (3, True)
    assert same_bits(found, weights_of(5))
    _, found = await read(reader, PolicyVersion(step=1))
    assert same_bits(found, weights_of(1)), "and who wants an older one"
    _, found = await read(reader, PolicyVersion(step=1))
    assert reader.last_read.num_bytes == 0, "what is held is not read again"
    assert same_bits(found, weights_of(1))


@pytest.mark.parametrize("what", ["bits of its base", "a delta once"])
async def test_damage_on_the_way_is_mended_from_the_anchor(what):
    store = MemoryStore()
    learner, reader = Learner(store, 2, anchor_every=9, keep=9), WeightPlane(store)
    for step in range(3):
        await learner.publish(step)
    await read(reader, PolicyVersion(step=1))
    held = reader._held
    assert held is not None
    if what == "bits of its base":
        held.blobs[1][700] ^= 1
    else:
        key = f"{PolicyVersion(step=2)}/delta/1"
        sound, store.data[key] = store.data[key], store.data[key].clone()
        store.data[key][40] ^= 4
        restore_after_first_read(store, key, sound)
    manifest, found = await read(reader, PolicyVersion(step=2))
    assert manifest.kind == "delta"
    assert same_bits(found, weights_of(2))
    assert "policy@0.2 cannot be rebuilt from its deltas" in reader.last_read.damage
    await learner.publish(3)
    await read(reader, PolicyVersion(step=3))
    assert reader.last_read.damage == ""


def restore_after_first_read(store, key, value):
    operate = store._operate

    async def operated(name, of):
        await operate(name, of)
        if (name, of) == ("get", key) and store.operations.count(("get", key)) > 1:
            store.data[key] = value

    store._operate = operated


async def test_damage_in_the_store_is_told_and_mended_by_staging_whole_what_was_staged_last():
    store = MemoryStore()
    learner, reader = Learner(store, 2, anchor_every=9, keep=9), WeightPlane(store)
    for step in range(3):
        await learner.publish(step)
    await read(reader, PolicyVersion(step=1))
    store.data[f"{PolicyVersion(step=2)}/delta/1"][-1] ^= 4
    with pytest.raises(
        DeltaError, match=r"policy@0\.2 cannot be rebuilt from its deltas: bucket 0 of a delta is damaged"
    ):
        await read(reader, PolicyVersion(step=2))
    for plane in learner.planes:
        await plane.restage(PolicyVersion(step=2))
    assert (await learner.planes[0].commit(PolicyVersion(step=2), 2)).kind == "full"
    assert same_bits((await read(reader, PolicyVersion(step=2)))[1], weights_of(2))
    manifest = await learner.publish(3)
    assert (manifest.kind, manifest.needs) == ("delta", {PolicyVersion(step=2)})
    assert same_bits((await read(reader, PolicyVersion(step=3)))[1], weights_of(3))
    for plane in learner.planes:
        with pytest.raises(WeightsError, match=r"policy@0\.2 cannot be staged anew: it is not what was staged last"):
            await plane.restage(PolicyVersion(step=2))


async def test_a_new_incarnation_and_another_layout_begin_with_a_whole_version():
    store = MemoryStore()
    learner = Learner(store, 2, anchor_every=9, keep=9)
    for step in range(2):
        manifest = await learner.publish(step)
    assert manifest.kind == "delta"
    again = Learner(store, 1, anchor_every=9, keep=9, incarnation=1)
    assert (await again.publish(1)).kind == "full"
    again.num_ranks, again.planes = 2, [again.planes[0], WeightPlane(store, deltas=DeltaWriter(9))]
    again.packers.append(Packer(1))
    assert (await again.publish(2)).kind == "full"


async def test_a_reader_that_fails_to_find_a_version_still_holds_the_one_it_has():
    store = MemoryStore()
    learner, reader = Learner(store, 1, anchor_every=9, keep=9), WeightPlane(store)
    for step in range(2):
        await learner.publish(step)
    await read(reader, PolicyVersion(step=0))
    with pytest.raises(WeightsError, match="not in the store"):
        await read(reader, PolicyVersion(step=7))
    await read(reader, PolicyVersion(step=1))
    assert reader.last_read.num_deltas == 1
    assert reader.last_read.num_bytes < 1500


async def test_who_keeps_the_newest_keeps_what_they_are_built_on():
    store = MemoryStore()
    learner = Learner(store, 1, anchor_every=3, keep=9)
    for step in range(5):
        await learner.publish(step)
    await learner.planes[0].retire_all_but(1)
    assert [version.step for version in await learner.planes[0].versions()] == [3, 4]
    await learner.publish(5)
    await learner.publish(6)
    await learner.planes[0].retire_all_but(1)
    assert [version.step for version in await learner.planes[0].versions()] == [6]
