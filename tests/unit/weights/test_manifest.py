import dataclasses

import pytest

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Packed, Part, Shard, build_manifest

VERSION = PolicyVersion(step=3)


def packed(parts):
    """A part for each rank, of shards that all claim to lie at its blob's beginning."""
    return [Packed(part=Part.of(rank, shards, 0)) for rank, shards in enumerate(parts)]


def rows(start, stop, *, name="w", rank=0, whole=(4, 2), dtype="float32", num_columns=2):
    """Rows [start, stop) of a parameter."""
    size = (stop - start) * num_columns
    return Shard(
        name=name, dtype=dtype, global_shape=whole, offsets=(start, 0), shape=(stop - start, num_columns), rank=rank,
        start_bytes=0, num_bytes=4 * size,
    )  # fmt: skip


def test_shards_that_tile_their_parameters_make_a_manifest():
    manifest = build_manifest(VERSION, packed([(rows(0, 3), rows(0, 4, name="v")), (rows(3, 4, rank=1),)]))
    assert manifest.names() == ("v", "w")
    assert manifest.num_bytes == 64
    assert [shard.offsets for shard in manifest.by_name()["w"]] == [(0, 0), (3, 0)]


@pytest.mark.parametrize(
    "parts",
    [
        [(rows(0, 3),), ()],  # a rank's shard is missing
        [(rows(0, 3),), (rows(2, 4, rank=1),)],  # two overlap
        [(rows(0, 2),), (rows(0, 2, rank=1),)],  # two are the same
        [(rows(0, 2),), (rows(4, 6, rank=1),)],  # one lies outside
        [(rows(-1, 3),)],
        [(rows(0, 4, num_columns=1),)],  # half of each row
    ],
)
def test_shards_that_do_not_tile_are_refused_by_name(parts):
    with pytest.raises(WeightsError, match=r"policy@0\.3: the shards of w .* do not tile its 8; nothing was published"):
        build_manifest(VERSION, packed([(rows(0, 4, name="v"),), *parts]))


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"whole": (5, 2)}])
def test_ranks_that_disagree_are_refused_by_name(change):
    with pytest.raises(WeightsError, match="disagree about shape or dtype of w"):
        build_manifest(VERSION, packed([(rows(0, 2),), (rows(2, 4, rank=1, **change),)]))


def test_a_scalar_parameter_is_held_by_one_rank():
    scalar = Shard(
        name="scale", dtype="float32", global_shape=(), offsets=(), shape=(), rank=0, start_bytes=0, num_bytes=4,
    )  # fmt: skip
    assert build_manifest(VERSION, packed([(scalar,)])).num_bytes == 4
    with pytest.raises(WeightsError, match="scale"):
        build_manifest(VERSION, packed([(scalar,), (dataclasses.replace(scalar, rank=1),)]))
