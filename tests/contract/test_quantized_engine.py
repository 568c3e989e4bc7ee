"""vLLM with quantised linear layers: what it computes, how versions follow, and how a wrong layer is found."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.core.errors import FingerprintError, PolicyError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.reading import check_served
from tests.engines import LONG_PROMPT, PROMPT, VERSIONS, VllmSubject, finish, generate, request, rows
from tests.models import make_model, manifest_of, without_end

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

TOKENS = np.array(LONG_PROMPT, dtype=np.int32)
GAP_NATS = 0.1
"""More than 7 or 8 bits a number cost this model on average, and far less than another model's weights."""
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
          "mlp.up_proj", "mlp.down_proj")  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def subject(request, engine_child, tmp_path_factory):
    folders = [without_end(make_model(tmp_path_factory.mktemp(f"quantized{seed}"), "qwen3", seed)) for seed in (0, 1)]
    made = VllmSubject(engine_child, folders, quantize="int8", dtype=request.param)
    if request.param == "bfloat16":
        made.weights = [{name: each.bfloat16() for name, each in weights.items()} for weights in made.weights]
    return made


@pytest.fixture
def engine(subject):
    load(subject, 0)
    return subject.engine


def load(subject, which):
    version = PolicyVersion(step=next(VERSIONS))
    subject.engine.load(subject.weights[which], version)
    return version


def test_it_computes_nearly_what_the_model_does(engine, subject):
    for which in (0, 1, 0):
        load(subject, which)
        scored = engine.score(TOKENS)
        gap = np.abs(scored - subject.logprobs(which, LONG_PROMPT)).mean()
        assert 1e-5 < gap < GAP_NATS
        assert np.abs(scored - subject.logprobs(1 - which, LONG_PROMPT)).mean() > 4 * GAP_NATS


def test_a_version_is_the_same_whenever_it_comes_and_however_it_was_prepared(engine, subject):
    first = engine.score(TOKENS)
    load(subject, 1)
    other = engine.score(TOKENS)
    assert not np.array_equal(first, other)
    load(subject, 0)
    assert np.array_equal(engine.score(TOKENS), first)
    left = engine.load_prepared(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    assert np.array_equal(engine.score(TOKENS), other)
    assert left == sorted(subject.weights[1].keys() - engine.sealed)


def test_just_the_linear_layers_are_sealed_and_the_rest_is_read_back(engine, subject):
    weights = subject.weights[0]
    assert engine.sealed == {name for name in weights if name.removesuffix(".weight").endswith(LAYERS)}
    read = dict(engine.read(list(weights)))
    assert read.keys() == weights.keys() - engine.sealed
    assert all(np.array_equal(read[name].float(), weights[name].float()) for name in read)
    check_served([manifest_of(weights, engine.version)], engine, "policy_0", "full")


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("self_attn.qkv_proj", "self_attn.q_proj"),
        ("self_attn.o_proj", "self_attn.o_proj"),
        ("mlp.gate_up_proj", "mlp.gate_proj"),
        ("mlp.down_proj", "mlp.down_proj"),
    ],
)
def test_a_layer_that_is_not_what_was_loaded_is_named(engine, subject, path, first):
    engine.replace_layer(f"model.layers.1.{path}", subject.weights[1])
    manifest = manifest_of(subject.weights[0], engine.version)
    with pytest.raises(FingerprintError, match=f"policy_0 pulled .*, but does not compute with model.layers.1.{first}"):
        check_served([manifest], engine, "policy_0", "full")
    others = [name for name in engine.sealed if not name.startswith(f"model.layers.1.{path[:4]}")]
    assert engine.first_wrong(others) == ""


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_of_a_fused_layer_the_part_that_is_wrong_is_named(engine, subject, part):
    name = f"model.layers.0.self_attn.{part}.weight"
    engine.replace_layer("model.layers.0.self_attn.qkv_proj", subject.weights[0] | {name: subject.weights[1][name]})
    assert engine.first_wrong(engine.sealed) == name


@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["as it is", "in a row of small weights"])
def test_one_changed_number_of_a_layer_is_found(engine, subject, size):
    name, path = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj"
    loaded = subject.weights[0][name].clone()
    loaded[5] *= size
    engine.load(subject.weights[0] | {name: loaded}, PolicyVersion(step=next(VERSIONS)))
    assert engine.first_wrong(engine.sealed) == ""
    changed = loaded.clone()
    changed[5, changed[5].abs().argmax()] *= -1
    engine.replace_layer(path, subject.weights[0] | {name: changed})
    assert engine.first_wrong(engine.sealed) == name


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(engine, subject):
    before, weights = engine.score(TOKENS), subject.weights[1]
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = {
        "shape": (weights | {name: weights[name][:-1]}, "and the engine holds"),
        "dtype": (weights | {name: weights[name].double()}, "float64"),
        "missing": ({each: weights[each] for each in weights if each != name}, f"has no {name}"),
        "plain": (weights | {"model.norm.weight": weights["model.norm.weight"][:-1]}, "model.norm.weight"),
    }
    for given, message in wrong.values():
        with pytest.raises(WeightsError, match=message):
            engine.load(given, PolicyVersion(step=next(VERSIONS)))
    assert np.array_equal(engine.score(TOKENS), before)


def test_requests_in_flight_go_on_with_the_new_version(engine, subject):
    old = engine.version
    engine.add([request("a", n=2, tokens=10)])
    for _ in range(4):
        engine.step()
    new = load(subject, 1)
    completions = finish(engine)["a"]
    steps = completions.versions.per_token_steps().reshape(2, 10).tolist()
    assert steps == [[old.step] * 4 + [new.step] * 6] * 2


def test_sampled_log_probabilities_are_those_of_the_quantised_model(engine):
    completions = generate(engine, request(tokens=12, seed=3))["a"]
    (tokens,), (logprobs,) = rows(completions), rows(completions, "logprobs")
    scored = engine.score(np.array([*PROMPT, *tokens], dtype=np.int32))[len(PROMPT) - 1 :]
    assert np.abs(np.array(logprobs) - scored).max() < 0.05


def test_what_cannot_be_quantised_is_refused_in_words(engine_child, tmp_path):
    folder = without_end(make_model(tmp_path / "model"))
    with pytest.raises(PolicyError, match="quantize=int8 .* adapters"):
        engine_child.build("tests.backends:vllm_engine", str(folder), {"rank": 4}, quantize="int8")
