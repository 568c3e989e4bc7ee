"""Law 5: a version is visible only when whole, however it is sharded and wherever its publication breaks off."""

import asyncio

import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Part, build_layout, build_manifest
from forge_async.weights.packing import LocalShard, Packer, pack, unpack
from forge_async.weights.plane import WeightPlane
from tests.fakes import MemoryStore, StoreCrashError

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5)


def cuts(size, num_ranks, draw):
    """Rows of each rank: uneven, some perhaps without any."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=num_ranks - 1, max_size=num_ranks - 1)))
    return list(zip([0, *inner], [*inner, size], strict=True))


@st.composite
def sharded_models(draw):
    """(model, the boxes of each rank): each parameter is cut by rows, or held by one rank."""
    num_ranks = draw(st.integers(1, 3))
    model = {
        f"p{i}": torch.randint(-9, 9, shape).to(dtype) for i, (shape, dtype) in enumerate(draw(models))
    }  # fmt: skip
    ranks = [[] for _ in range(num_ranks)]
    for name, tensor in model.items():
        shape = tuple(tensor.shape)
        if not shape or draw(st.booleans()):
            box = LocalShard(name=name, tensor=tensor, global_shape=shape, offsets=(0,) * len(shape))
            ranks[draw(st.integers(0, num_ranks - 1))].append(box)
            continue
        for rank, (start, stop) in enumerate(cuts(shape[0], num_ranks, draw)):
            offsets = (start, *[0] * (len(shape) - 1))
            ranks[rank].append(LocalShard(name=name, tensor=tensor[start:stop], global_shape=shape, offsets=offsets))
    return model, ranks


@given(sharded_models())
def test_any_sharding_by_rows_comes_back_whole(sharded):
    model, ranks = sharded
    packed = [pack(boxes, rank) for rank, boxes in enumerate(ranks)]
    manifest = build_manifest(PolicyVersion(), [part for part, _ in packed])
    weights = unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(packed)})
    assert weights.keys() == {name for name, tensor in model.items() if tensor.numel()}
    for name, tensor in weights.items():
        assert tensor.dtype == model[name].dtype
        assert torch.equal(tensor, model[name])


@given(sharded_models(), st.data())
def test_a_manifest_with_a_shard_left_out_is_refused(sharded, data):
    _, ranks = sharded
    parts = [Packer(rank).pack(boxes)[0] for rank, boxes in enumerate(ranks)]
    several = [shard for part in parts for shard in part.shards if not shard.is_whole]
    if not several:
        return
    left_out = data.draw(st.sampled_from(several))
    try:
        build_layout(
            PolicyVersion(),
            [Part.of(part.rank, [each for each in part.shards if each is not left_out], 0) for part in parts],
        )
    except WeightsError as error:
        assert left_out.name in str(error)
    else:
        raise AssertionError("published without a part")


def parts_of(step, num_ranks):
    """A model whose every element is `step`, one row a rank, two parameters."""
    boxes = (
        [LocalShard(name=name, tensor=torch.full((1, 3), step), global_shape=(num_ranks, 3), offsets=(rank, 0))
         for name in "ab"] for rank in range(num_ranks)
    )  # fmt: skip
    return [Packer(rank).pack(each) for rank, each in enumerate(boxes)]


async def publish(store, step, num_ranks):
    plane, version = WeightPlane(store), PolicyVersion(step=step)
    await asyncio.gather(*(plane.stage(version, part, blob) for part, blob in parts_of(step, num_ranks)))
    await plane.commit(version, num_ranks, retire=[PolicyVersion(step=step - 2)])


async def elements_seen(store):
    """What a reader of the newest version finds in its weights, and that version's step."""
    plane = WeightPlane(store)
    newest = (await plane.versions())[-1]
    async with plane.reading(newest) as (manifest, blobs):
        weights = unpack(manifest, blobs)
    assert weights.keys() == {"a", "b"}
    return {int(element) for tensor in weights.values() for element in tensor.flatten()}, newest.step


@given(num_ranks=st.integers(1, 3), num_whole=st.integers(1, 3), crash_after=st.integers(0, 30))
def test_wherever_a_publication_dies_readers_see_the_old_or_the_new_never_a_mix(num_ranks, num_whole, crash_after):
    async def story():
        store = MemoryStore()
        for step in range(num_whole):
            await publish(store, step, num_ranks)
        dying = MemoryStore(crash_after=crash_after)
        dying.data = store.data
        try:
            await publish(dying, num_whole, num_ranks)
        except StoreCrashError:
            pass
        elements, step = await elements_seen(store)
        assert elements == {step}
        committed = ("put", f"{PolicyVersion(step=num_whole)}/manifest") in dying.operations
        assert step == (num_whole if committed else num_whole - 1)

    asyncio.run(story())


@given(num_ranks=st.integers(1, 3), num_turns=st.integers(0, 30))
def test_a_reader_beside_a_publication_sees_the_old_or_the_new(num_ranks, num_turns):
    async def story():
        store = MemoryStore()
        await publish(store, 0, num_ranks)
        await publish(store, 1, num_ranks)
        publishing = asyncio.create_task(publish(store, 2, num_ranks))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        elements, step = await elements_seen(store)
        assert elements == {step}
        assert step in (1, 2)
        await publishing

    asyncio.run(story())
