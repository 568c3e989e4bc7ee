"""What a learner rank publishes to a store, and again to the one that takes its place."""

from concurrent.futures import Future

import pytest
import torch

from forge_async.core.errors import LearnerError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.chains import DeltaWriter
from forge_async.weights.manifest import Probe
from forge_async.weights.packing import LocalShard, Packer, unpack, unpacked
from forge_async.weights.plane import WeightPlane
from forge_async.weights.snapshots import Snapshots
from forge_async.weights.store_end import StoreEnd
from tests.fakes import MemoryStore, StoreCrashError

ROWS, COLUMNS = 2, 64
FROZEN, A, B = "w.weight", "w.lora_A.weight", "w.lora_B.weight"


def version(step):
    return PolicyVersion(step=step)


def copied(packed):
    done = Future()
    done.set_result(packed)
    return done


def packed(step, rank=0, num_ranks=1, names=(FROZEN,)):
    """Rows of parameters that change with each step, but for what is frozen where there are adapters."""
    shards = []
    for name in names:
        value = torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS)
        if name != FROZEN or len(names) == 1:
            value[:, 0] += step
        rows = ROWS // num_ranks
        box = value[rank * rows : (rank + 1) * rows]
        shards.append(LocalShard(name=name, tensor=box, global_shape=(ROWS, COLUMNS), offsets=(rank * rows, 0)))
    return Packer(rank).pack(shards)


def probe(step):
    return Probe(token_ids=(1, 2), logprobs=(-float(step),))


class Rank:
    """A learner rank: its snapshots, and its end of one store after the other."""

    def __init__(self, rank=0, num_ranks=1, *, deltas=False, adapters=False, keeps_last=True):
        self.rank, self.num_ranks, self.deltas, self.adapters = rank, num_ranks, deltas, adapters
        self.snapshots = Snapshots(keeps_last=keeps_last)

    def snapshot(self, step, names=(FROZEN,), probe=None):
        self.snapshots.add(version(step), copied(packed(step, self.rank, self.num_ranks, names)), probe)

    def join(self, store):
        plane = WeightPlane(store, deltas=DeltaWriter(20) if self.deltas else None)
        self.end = StoreEnd(
            plane, self.snapshots, num_ranks=self.num_ranks, whole=self._whole if self.adapters else None
        )
        return self

    async def _whole(self, held):
        frozen = unpacked(*packed(0, names=(FROZEN, A)))[:1]
        return Packer(self.rank).pack(sorted([*frozen, *unpacked(*held)], key=lambda shard: shard.name))


async def publish(step, *ranks):
    for rank in ranks:
        await rank.end.stage(version(step))
    return await ranks[0].end.commit(version(step))


async def read(store, step):
    async with WeightPlane(store).reading(version(step)) as (manifest, blobs):
        return manifest, unpack(manifest, blobs)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("deltas", [False, True])
async def test_what_was_published_last_comes_into_another_store_whole_and_with_the_same_bits(num_ranks, deltas):
    stores = [MemoryStore(), MemoryStore()]
    ranks = [Rank(rank, num_ranks, deltas=deltas).join(stores[0]) for rank in range(num_ranks)]
    for step in range(2):
        for rank in ranks:
            rank.snapshot(step, probe=probe(step))
        await publish(step, *ranks)
    before, expected = await read(stores[0], 1)
    assert before.kind == ("delta" if deltas else "full")
    for rank in ranks:
        rank.snapshot(2, probe=probe(2))  # waits, as one that was taken while the store was gone
        rank.join(stores[1])
    await publish(1, *ranks)
    again, found = await read(stores[1], 1)
    assert again.kind == "full" and again.digests == before.digests
    assert before.probe == again.probe == probe(1)
    assert torch.equal(found[FROZEN], expected[FROZEN])
    await publish(2, *ranks)
    manifest, found = await read(stores[1], 2)
    assert manifest.kind == ("delta" if deltas else "full"), "and deltas begin anew there"
    assert found[FROZEN][0, 0] == 2 and manifest.probe == probe(2)


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_publication_that_the_death_broke_off_anywhere_is_made_whole_elsewhere(num_ranks):
    crash_after = 0
    while True:
        stores = [MemoryStore(crash_after), MemoryStore()]
        ranks = [Rank(rank, num_ranks).join(stores[0]) for rank in range(num_ranks)]
        for rank in ranks:
            rank.snapshot(3, probe=probe(3))
        try:
            await publish(3, *ranks)
        except StoreCrashError:
            crash_after += 1
        else:
            break
        await publish(3, *[rank.join(stores[1]) for rank in ranks])
        manifest, found = await read(stores[1], 3)
        assert found[FROZEN][:, 0].tolist() == [3, COLUMNS + 3] and manifest.probe == probe(3)
    assert crash_after >= 4


async def test_adapters_alone_become_a_whole_version_in_a_store_without_what_lies_below_them():
    stores = [MemoryStore(), MemoryStore()]
    rank = Rank(adapters=True).join(stores[0])
    rank.snapshot(0, (FROZEN, A, B))
    for step in range(1, 4):
        rank.snapshot(step, (A, B))
    bases = [(await publish(step, rank)).base for step in range(3)]
    assert bases == ["", "policy@0.0", "policy@0.0"]
    rank.join(stores[1])
    again = await publish(2, rank)
    assert (again.kind, again.base) == ("full", "")
    _, found = await read(stores[1], 2)
    assert found.keys() == {FROZEN, A, B}
    assert (found[FROZEN][0, 0], found[A][0, 0], found[B][0, 0]) == (0, 2, 2)
    after = await publish(3, rank)
    assert (after.kind, after.base) == ("adapter", "policy@0.2")
    assert (await read(stores[1], 3))[1][A][0, 0] == 3


async def test_a_broken_off_call_of_the_old_store_says_nothing_of_the_new_one():
    """It may come to its end after the change: what it notes then is of the store that it was for."""
    old, new = MemoryStore(), MemoryStore()
    rank = Rank(adapters=True).join(old)
    rank.snapshot(0, (A, B))
    under_way = rank.end
    rank.join(new)
    await under_way.stage(version(0))
    assert (await publish(0, rank)).base == ""
    assert not old.data


async def test_without_a_second_chance_a_snapshot_is_let_go_of():
    rank = Rank(keeps_last=False).join(MemoryStore())
    rank.snapshot(0)
    await publish(0, rank)
    with pytest.raises(LearnerError, match=r"no snapshot of policy@0\.0"):
        await rank.end.stage(version(0))


async def test_only_what_was_staged_last_is_kept():
    rank = Rank().join(MemoryStore())
    for step in range(2):
        rank.snapshot(step)
    assert len(rank.snapshots) == 2
    for step in range(2):
        await publish(step, rank)
    assert len(rank.snapshots) == 0
    await rank.end.stage(version(1))
    with pytest.raises(LearnerError, match="no snapshot"):
        await rank.end.stage(version(0))


async def test_a_version_that_was_staged_nowhere_is_not_committed():
    ranks = [Rank(rank, 2).join(MemoryStore()) for rank in range(2)]
    for rank in ranks:
        rank.snapshot(0)
    with pytest.raises(WeightsError, match="never staged"):
        await ranks[0].end.commit(version(0))


@pytest.mark.parametrize("deltas", [False, True])
async def test_the_only_rank_need_not_be_asked_to_stage(deltas):
    stores = [MemoryStore(), MemoryStore()]
    rank = Rank(deltas=deltas).join(stores[0])
    for step in range(2):
        rank.snapshot(step, probe=probe(step))
        await rank.end.commit(version(step))
    manifest, found = await read(stores[0], 1)
    assert (manifest.kind, manifest.probe) == ("delta" if deltas else "full", probe(1))
    assert found[FROZEN][0, 0] == 1
    rank.join(stores[1])
    again = await rank.end.commit(version(1))
    assert again.kind == "full" and again.digests == manifest.digests, "what it published last, in another store"
    with pytest.raises(LearnerError, match="no snapshot"):
        await rank.end.commit(version(2))


async def test_what_was_staged_anew_as_a_whole_is_committed_as_it_is():
    rank = Rank(deltas=True).join(MemoryStore())
    for step in range(2):
        rank.snapshot(step)
        await rank.end.commit(version(step))
    await rank.end.plane.restage(version(1))
    assert (await rank.end.commit(version(1))).kind == "full"
