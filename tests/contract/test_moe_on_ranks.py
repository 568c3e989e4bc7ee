"""A mixture of experts on an engine of two ranks: each pulls, serves and gives back its slice of every expert."""

from __future__ import annotations

import re

import numpy as np
import pytest

from forge_async.core.errors import FingerprintError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint
from tests.engines import VERSIONS, VllmSubject
from tests.models import make_model, manifest_of, without_end

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(500)]

TOKENS = np.arange(4, 60, dtype=np.int32)


@pytest.fixture(scope="module", params=["qwen3_moe_wide", "qwen3_moe_mixed"])
def served(request, ranks_child, tmp_path_factory):
    """An engine, two sets of weights for it, and their references. Each rank pads its slices of the mixed one."""
    folders = [without_end(make_model(tmp_path_factory.mktemp(f"m{seed}"), request.param, seed)) for seed in (0, 1)]
    return VllmSubject(ranks_child, folders, scratch=tmp_path_factory.mktemp("store") / "weights")


def load(subject, weights, **how):
    version = PolicyVersion(step=next(VERSIONS))
    subject.engine.load(weights, version, **how)
    return version


def test_every_version_is_served_from_every_layout_and_given_back_bit_for_bit(served):
    for which, layout in ((0, "halves"), (1, "experts_apart"), (0, "experts_apart"), (1, "halves")):
        weights = served.weights[which]
        version = load(served, weights, layout=layout)
        assert served.engine.score(TOKENS) == pytest.approx(served.logprobs(which, TOKENS), abs=1e-5)
        read = dict(served.engine.read(sorted(weights)))
        assert {name: tensor.tolist() for name, tensor in read.items()} == {
            name: tensor.tolist() for name, tensor in weights.items()
        }
        check_fingerprint(manifest_of(weights, version), served.engine.read, "policy_0")


@pytest.mark.parametrize("matrix", ["gate", "up", "down"])
@pytest.mark.parametrize("place", [(3, 4), (-1, -1)], ids=["on_the_first_rank", "on_the_second_rank"])
def test_one_wrong_element_of_one_expert_is_named(served, matrix, place):
    name = f"model.layers.1.mlp.experts.2.{matrix}_proj.weight"
    wrong = {key: tensor.clone() for key, tensor in served.weights[0].items()}
    wrong[name][place] += 1e-6
    version = load(served, wrong)
    check_fingerprint(manifest_of(wrong, version), served.engine.read, "policy_0")
    with pytest.raises(FingerprintError, match=re.escape(name) + " as it is served differs"):
        check_fingerprint(manifest_of(served.weights[0], version), served.engine.read, "policy_0")


@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_experts_that_do_not_fit_are_refused_before_anything_is_written(served, damage):
    load(served, served.weights[0])
    weights, name = dict(served.weights[1]), "model.layers.1.mlp.experts.2.up_proj.weight"
    weights[name] = weights[name][:-1] if damage == "shape" else weights[name].double()
    with pytest.raises(WeightsError, match=re.escape(name)):
        load(served, weights)
    assert served.engine.score(TOKENS) == pytest.approx(served.logprobs(0, TOKENS), abs=1e-5)
