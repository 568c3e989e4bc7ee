"""Mixtures of experts, from the folder to the engine and back: learner, engine and transformers compute alike."""

from __future__ import annotations

import re

import numpy as np
import pytest

from forge_async.core.errors import FingerprintError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint
from forge_async.weights.manifest import Packed, build_manifest
from forge_async.weights.packing import unpack
from tests.child import call_all
from tests.contract.test_learner import (
    TitanSubject,
    all_ranks,
    assert_close,
    make_samples,
    off_policy,
    on_policy,
    share,
    weights_of,
)
from tests.engines import VERSIONS, VllmSubject
from tests.models import Reference, make_model, manifest_of, read_weights, without_end

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

TOKENS = np.arange(4, 60, dtype=np.int32)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_moe_mixed"])
def any_moe(request, children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("any"), request.param))


@pytest.fixture(scope="module")
def moe(children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("moe"), "qwen3_moe"))


def test_the_learner_computes_what_transformers_does_and_saves_what_it_loads(any_moe, tmp_path):
    learner = any_moe.make(lr=1e-2)
    assert learner.score([TOKENS])[0] == pytest.approx(any_moe.logprobs(TOKENS), abs=1e-5)
    before = read_weights(any_moe.folder)
    assert {name: tensor.tolist() for name, tensor in weights_of(learner).items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }
    learner.train(share(on_policy(make_samples(), learner)))
    learner.save(tmp_path / "saved")
    after = read_weights(tmp_path / "saved")
    assert after.keys() == before.keys()
    moved = {name for name in after if not bool((after[name] == before[name]).all())}
    assert {name.rpartition(".layers.")[2] for name in moved} >= {"1.mlp.gate.weight", "1.mlp.experts.0.up_proj.weight"}
    assert learner.score([TOKENS])[0] == pytest.approx(Reference(tmp_path / "saved").logprobs(TOKENS), abs=1e-5)


def test_nothing_that_the_learner_computes_with_stays_unpublished(children, moe):
    """torchtitan's load balancing would add a bias to the routers that no sampler has."""
    learner = moe.make()
    state = children[0].build("tests.backends:state_of_learner")
    published = sum(tensor.numel() for tensor in weights_of(learner).values())
    assert not [name for name in state.names if "bias" in name]
    assert published == state.num_elements


@pytest.mark.parametrize("how", [{}, {"expert_parallel": 2}], ids=["fsdp", "experts_spread"])
def test_two_ranks_train_as_one_and_their_experts_tile(moe, children, how, tmp_path):
    alone = moe.make(lr=1e-4)
    batches = [off_policy(make_samples(seed=seed), alone) for seed in range(2)]
    results, weights = [alone.train(share(samples)) for samples in batches], weights_of(alone)
    ranks = all_ranks(children, moe.folder, lr=1e-4, **how)
    assert [rank.batch_ranks for rank in ranks] == [2, 2]
    for result, samples in zip(results, batches, strict=True):
        for mine in call_all(ranks, "train", [(each,) for each in share(samples, 2)]):
            assert mine.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)
            assert mine.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
            assert mine.figures == pytest.approx(result.figures, rel=1e-4, abs=1e-6)
    parts = call_all(ranks, "snapshot", [(), ()])
    manifest = build_manifest(PolicyVersion(step=2), [Packed(part=part) for part, _ in parts])
    holders = {shard.rank for name, shards in manifest.by_name().items() if "experts" in name for shard in shards}
    assert holders == {0, 1}
    assert_close(weights, unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(parts)}))
    digests = call_all(ranks, "digest", [(), ()])
    assert digests[0] == digests[1]
    call_all(ranks, "save", [(tmp_path / "model",)] * 2)
    reference = Reference(tmp_path / "model")
    for (scored,) in call_all(ranks, "score", [([TOKENS],)] * 2):
        assert scored == pytest.approx(reference.logprobs(TOKENS), abs=1e-5)


def test_experts_that_ranks_share_unevenly_tile_too(children, tmp_path_factory):
    subject = TitanSubject(children[0], make_model(tmp_path_factory.mktemp("odd"), "qwen3_moe_mixed"))
    weights = read_weights(subject.folder)
    parts = call_all(all_ranks(children, subject.folder), "snapshot", [(), ()])
    manifest = build_manifest(PolicyVersion(step=0), [Packed(part=part) for part, _ in parts])
    whole = unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(parts)})
    assert {name: tensor.tolist() for name, tensor in whole.items()} == {
        name: tensor.tolist() for name, tensor in weights.items()
    }


@pytest.fixture(scope="module")
def served(mixture_child, tmp_path_factory):
    """An engine of the mixture that records routing, two sets of weights for it, and their references."""
    folders = [without_end(make_model(tmp_path_factory.mktemp(f"served{seed}"), "qwen3_moe", seed)) for seed in (0, 1)]
    return VllmSubject(mixture_child, folders, keep_routing=True)


def load(subject, which=0, weights=None, **how):
    version = PolicyVersion(step=next(VERSIONS))
    subject.engine.load(weights or subject.weights[which], version, **how)
    return version


def test_the_engine_serves_every_version_of_the_experts_and_gives_it_back(served):
    for which in (0, 1, 0):
        load(served, which)
        assert served.engine.score(TOKENS) == pytest.approx(served.logprobs(which, TOKENS), abs=1e-5)
        read = dict(served.engine.read(sorted(served.weights[which])))
        assert {name: tensor.tolist() for name, tensor in read.items()} == {
            name: tensor.tolist() for name, tensor in served.weights[which].items()
        }


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3_moe_mixed", "float32"), ("qwen3_moe", "bfloat16")])
def test_padded_experts_and_other_dtypes_are_served_as_they_were_loaded(mixture_child, tmp_path, kind, dtype):
    import torch

    folder = without_end(make_model(tmp_path / "model", kind))
    subject = VllmSubject(mixture_child, [folder], dtype=dtype)
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in subject.weights[0].items()}
    version = load(subject, weights=weights)
    check_fingerprint(manifest_of(weights, version), subject.engine.read, "policy_0")
    tolerance = 1e-5 if dtype == "float32" else 1.0
    assert subject.engine.score(TOKENS) == pytest.approx(subject.logprobs(0, TOKENS), abs=tolerance)


@pytest.mark.parametrize(
    "name", [f"model.layers.1.mlp.experts.5.{each}_proj.weight" for each in ("gate", "up", "down")]
)
def test_one_wrong_element_of_one_expert_in_the_engine_is_named(served, name):
    wrong = {key: tensor.clone() for key, tensor in served.weights[0].items()}
    wrong[name][3, 4] += 1e-6
    version = load(served, weights=wrong)
    check_fingerprint(manifest_of(wrong, version), served.engine.read, "policy_0")
    with pytest.raises(FingerprintError, match=re.escape(name) + " as it is served differs"):
        check_fingerprint(manifest_of(served.weights[0], version), served.engine.read, "policy_0")


def test_vllms_own_way_to_load_leaves_wrong_experts_and_the_fingerprint_tells(served):
    """What would happen without `vllm_experts`: the parameters are prepacked once, and plain matrices written there."""
    version = load(served, 0)
    served.engine.load_as_vllm_does(served.weights[1])
    assert np.abs(served.engine.score(TOKENS) - served.logprobs(1, TOKENS)).max() > 0.1
    with pytest.raises(FingerprintError, match=r"mlp\.experts\.\d\.\w+_proj\.weight as it is served differs"):
        check_fingerprint(manifest_of(served.weights[1], version), served.engine.read, "policy_0")


@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_experts_that_do_not_fit_are_refused_before_anything_is_written(served, damage):
    load(served, 0)
    weights, name = dict(served.weights[1]), "model.layers.1.mlp.experts.7.up_proj.weight"
    weights[name] = weights[name][:-1] if damage == "shape" else weights[name].double()
    with pytest.raises(WeightsError, match=re.escape(name)):
        served.engine.load(weights, PolicyVersion(step=next(VERSIONS)))
    assert served.engine.score(TOKENS) == pytest.approx(served.logprobs(0, TOKENS), abs=1e-5)
