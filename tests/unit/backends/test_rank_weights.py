"""Reading back an engine whose ranks hold parts of its model."""

import pytest
import torch

from forge_async.backends.vllm_rank_weights import RankWeights
from forge_async.core.errors import FingerprintError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint
from forge_async.weights.manifest import build_manifest
from forge_async.weights.packing import LocalShard, pack
from forge_async.weights.reshard import Wanted

MODEL = {"rows": torch.arange(12.0).view(4, 3), "columns": torch.arange(8.0).view(2, 4), "norm": torch.arange(3.0)}


def box(name, offsets, shape):
    wanted = Wanted(name=name, dtype="float32", global_shape=tuple(MODEL[name].shape), offsets=offsets, shape=shape)
    place = tuple(slice(low, low + size) for low, size in zip(offsets, shape, strict=True))
    return wanted, MODEL[name][place].clone()


class Ranks:
    """Two ranks with an uneven cut by rows, one by columns, and a copy each of the norm."""

    num_ranks = 2

    def __init__(self):
        self.held = [
            [box("rows", (0, 0), (3, 3)), box("columns", (0, 0), (2, 2)), box("norm", (0,), (3,))],
            [box("rows", (3, 0), (1, 3)), box("columns", (0, 2), (2, 2)), box("norm", (0,), (3,))],
        ]
        self.calls = []

    def call(self, method, *args):
        self.calls.append((method, *args))
        return [[(wanted, held) for wanted, held in rank if wanted.name in args[0]] for rank in self.held]


@pytest.fixture
def ranks():
    return Ranks()


@pytest.fixture
def weights(ranks):
    return RankWeights(ranks, [[wanted for wanted, _ in rank] for rank in ranks.held])


@pytest.fixture
def manifest():
    shards = [
        LocalShard(name=name, tensor=tensor, global_shape=tuple(tensor.shape), offsets=(0,) * tensor.dim())
        for name, tensor in MODEL.items()
    ]
    return build_manifest(PolicyVersion(step=3), [pack(shards, 0)[0]])


def test_what_ranks_hold_is_put_together_and_every_copy_is_shown(weights, manifest):
    read = list(weights.read(["norm", "rows", "unknown", "columns"]))
    assert [name for name, _ in read] == ["norm", "norm", "rows", "columns"]
    assert all(torch.equal(tensor, MODEL[name]) for name, tensor in read)
    check_fingerprint(manifest, weights.read, "policy_0")


@pytest.mark.parametrize(("rank", "place"), [(0, 0), (1, 0), (1, 1), (0, 2), (1, 2)])
def test_one_wrong_element_on_one_rank_is_noticed(ranks, weights, manifest, rank, place):
    wanted, held = ranks.held[rank][place]
    held.view(-1)[-1] += 1
    with pytest.raises(FingerprintError, match=f"{wanted.name} as it is served differs"):
        check_fingerprint(manifest, weights.read, "policy_0")


def test_a_part_that_no_rank_holds_is_noticed(ranks, weights, manifest):
    del ranks.held[1][0]
    with pytest.raises(FingerprintError, match=r"holds rows with shape \(3, 3\)"):
        check_fingerprint(manifest, weights.read, "policy_0")


def test_a_large_model_is_read_back_in_pieces(ranks, weights, monkeypatch):
    monkeypatch.setattr("forge_async.backends.vllm_rank_weights.READ_ELEMENTS", 10)
    assert {name for name, _ in weights.read(MODEL)} == MODEL.keys()
    assert ranks.calls == [("read", ["rows"]), ("read", ["columns", "norm"])]


def test_a_load_is_one_call_of_all_ranks(ranks, weights):
    ranks.call = lambda method, *args: ranks.calls.append((method, *args))
    weights.load()
    assert ranks.calls == [("load",)]
