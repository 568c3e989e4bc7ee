import gc
import weakref

import pytest
import torch

from forge_async.core.errors import FingerprintError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint, sample
from forge_async.weights.manifest import Packed, build_manifest
from forge_async.weights.packing import (
    ALIGNMENT_BYTES,
    LocalShard,
    Packer,
    check_blob,
    digest,
    digests,
    pack,
    unpack,
    unpacked,
)
from tests.far_memory import Far

VERSION = PolicyVersion(step=3)


def whole(name, tensor):
    return LocalShard(name=name, tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return {"b": torch.randn(3, 5), "a": torch.randn(7).bfloat16(), "scale": torch.tensor(2.5)}


@pytest.fixture
def packed(model):
    shards, blob = pack([whole(name, tensor) for name, tensor in model.items()], 0)
    return build_manifest(VERSION, [shards]), blob


def test_a_model_held_by_one_rank_comes_back_as_views_of_its_blob(model, packed):
    manifest, blob = packed
    weights = unpack(manifest, {0: blob})
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.items())
    assert all(weights[name].dtype == tensor.dtype for name, tensor in model.items())
    within = range(blob.data_ptr(), blob.data_ptr() + blob.numel())
    assert all(tensor.data_ptr() in within for tensor in weights.values())
    assert all(shard.start_bytes % ALIGNMENT_BYTES == 0 for shard in manifest.shards)


def test_packing_copies_so_that_the_next_step_changes_nothing(model, packed):
    manifest, blob = packed
    before = model["b"].clone()
    model["b"].add_(1)
    assert torch.equal(unpack(manifest, {0: blob})["b"], before)


def test_blobs_that_numpy_cannot_see_are_copied_to_be_hashed(packed):
    manifest, blob = packed
    far = blob.as_subclass(Far)
    with pytest.raises(TypeError):
        far.numpy()
    assert digests(manifest.layout.parts[0], far) == manifest.digests
    check_blob(manifest, 0, far)


def test_what_is_put_together_lies_beside_the_blobs():
    halves = [LocalShard(name="w", tensor=torch.ones(1, 4), global_shape=(2, 4), offsets=(row, 0)) for row in (0, 1)]
    packs = [pack([half], rank) for rank, half in enumerate(halves)]
    manifest = build_manifest(VERSION, [each for each, _ in packs])
    elsewhere = {rank: blob.to("meta") for rank, (_, blob) in enumerate(packs)}
    assert unpack(manifest, elsewhere)["w"].device.type == "meta"


def test_a_transposed_box_is_packed_in_row_major_order():
    tensor = torch.arange(6.0).view(2, 3).t()
    shards, blob = pack([whole("w", tensor)], 0)
    assert torch.equal(unpack(build_manifest(VERSION, [shards]), {0: blob})["w"], tensor)
    manifest = build_manifest(VERSION, [shards])
    assert manifest.digest_of(manifest.shards[0]) == digest(tensor)


def test_every_flipped_byte_shows_in_a_digest(packed):
    manifest, blob = packed
    for shard in manifest.shards:
        for at in range(shard.start_bytes, shard.start_bytes + shard.num_bytes):
            damaged = blob.clone()
            damaged[at] ^= 1
            with pytest.raises(WeightsError, match=rf"policy@0\.3: {shard.name} arrived damaged"):
                check_blob(manifest, 0, damaged)
    check_blob(manifest, 0, blob)


def test_a_blob_cut_short_is_noticed(packed):
    manifest, blob = packed
    with pytest.raises(WeightsError, match="scale arrived damaged"):
        check_blob(manifest, 0, blob[: manifest.shards[-1].start_bytes])


def reader(weights):
    return lambda names: ((name, weights[name]) for name in names if name in weights)


def test_what_is_served_as_published_passes(model, packed):
    check_fingerprint(packed[0], reader(model), "policy_0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda t: t + 1, "scale": lambda t: t + 1}, "policy_0 pulled policy@0.3, but a as it is served differs"),
        ({"b": lambda t: t.bfloat16()}, "but b as it is served differs"),
        ({"b": lambda t: t[:2]}, r"policy_0 holds b with shape \(2, 5\), and policy@0.3 has \(3, 5\)"),
        ({"scale": lambda t: None}, "serves no scale"),
    ],
)
def test_the_first_parameter_that_differs_is_named(model, packed, change, message):
    served = {name: change.get(name, lambda t: t)(tensor) for name, tensor in model.items()}
    served = {name: tensor for name, tensor in served.items() if tensor is not None}
    with pytest.raises(FingerprintError, match=message):
        check_fingerprint(packed[0], reader(served), "policy_0")


def test_a_rank_that_holds_nothing_packs_nothing():
    shards, blob = pack([LocalShard(name="w", tensor=torch.zeros(0, 4), global_shape=(3, 4), offsets=(3, 0))], 1)
    assert shards.part.shards == ()
    assert blob.numel() == 0


def test_a_packer_writes_into_the_memory_that_it_is_given_and_plans_anew_when_shards_change(model):
    packer, memory = Packer(0), [torch.full((packed_bytes(model),), 7, dtype=torch.uint8) for _ in range(6)]
    parts = []
    for turn, blob in enumerate([*memory, *memory]):
        shards = [whole(name, tensor + turn) for name, tensor in model.items()]
        part, used = packer.pack(shards, blob)
        assert used is blob
        weights = unpack(build_manifest(VERSION, [Packed(part=part)]), {0: blob})
        assert all(torch.equal(weights[name], tensor + turn) for name, tensor in model.items())
        parts.append(part)
    assert all(part is parts[0] for part in parts)
    part, used = packer.pack([whole("b", model["b"])], memory[0])
    assert used is not memory[0]
    assert [shard.name for shard in part.shards] == ["b"]
    assert packer.blob_bytes == used.numel() == 64


def packed_bytes(model):
    return Packer(0).pack([whole(name, tensor) for name, tensor in model.items()])[1].numel()


def test_equal_parts_have_equal_ids_and_others_do_not(model):
    ids = [Packer(rank).pack([whole(name, model[name]) for name in names])[0].id
           for rank, names in ((0, "ab"), (0, "ab"), (1, "ab"), (0, "ba"))]  # fmt: skip
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_samples_are_small_and_over_many_versions_reach_every_parameter():
    shards = [whole(f"p{i}", torch.zeros(1 << 18)) for i in range(40)]
    packed, _ = pack(shards, 0)
    reached = set()
    for step in range(40):
        names = sample(build_manifest(PolicyVersion(step=step), [packed]))
        assert 1 <= len(names) <= 4
        reached |= set(names)
    assert reached == {shard.name for shard in shards}


def test_a_sampled_comparison_reads_only_the_names_asked(model, packed):
    changed = {name: tensor + 1 for name, tensor in model.items() if name != "a"} | {"a": model["a"]}
    check_fingerprint(packed[0], reader(changed), "policy_0", ["a"])
    with pytest.raises(FingerprintError, match="but b as it is served differs"):
        check_fingerprint(packed[0], reader(changed), "policy_0", ["a", "b"])


def test_a_packer_lets_go_of_memory_that_will_not_come_again():
    packer, shard = Packer(0), LocalShard(name="w", tensor=torch.ones(4), global_shape=(4,), offsets=(0,))
    _, fresh = packer.pack([shard])
    lent = torch.zeros_like(fresh)
    gone = weakref.ref(lent.untyped_storage())
    part, blob = packer.pack([shard], lent)
    assert blob is lent
    del lent, blob
    assert gone() is not None, "its views are kept"
    packer.forget_memory()
    gc.collect()
    assert gone() is None
    assert packer.pack([shard], fresh)[0] == part


def test_packed_shards_are_told_apart_again():
    shards = [
        LocalShard(name="w", tensor=torch.arange(6.0).reshape(2, 3), global_shape=(4, 3), offsets=(2, 0)),
        LocalShard(name="x", tensor=torch.ones(5, dtype=torch.bfloat16), global_shape=(5,), offsets=(0,)),
    ]
    found = unpacked(*Packer(0).pack(shards))
    for one, other in zip(shards, found, strict=True):
        assert (one.name, one.global_shape, one.offsets) == (other.name, other.global_shape, other.offsets)
        assert other.tensor.dtype == one.tensor.dtype and torch.equal(one.tensor, other.tensor)
