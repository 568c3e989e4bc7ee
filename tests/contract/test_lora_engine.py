"""The real engine with adapters that change in memory; `make test-long` runs an engine's whole contract on them too."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.core.errors import FingerprintError, PolicyError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint
from tests.engines import LONG_PROMPT, PROMPT, VERSIONS, VllmAdapterSubject, finish, generate, request, rows
from tests.models import Reference, make_model, manifest_of, random_adapter, without_end

pytestmark = [pytest.mark.timeout(180), pytest.mark.stack]

TARGETS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
"""Parts of fused layers, and whole ones."""


@pytest.fixture(scope="module")
def subject(engine_child, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    base = without_end(make_model(folder / "base", "llama"))
    adapters = [random_adapter(folder / f"a{seed}", base, seed, targets=TARGETS) for seed in (1, 2)]
    made = VllmAdapterSubject(engine_child, base, adapters, TARGETS, held=3)
    made.plain = Reference(base)
    return made


@pytest.fixture
def engine(subject):
    subject.engine.load(subject.base | subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    return subject.engine


def assert_is(logprobs, wanted):
    assert logprobs == pytest.approx(wanted, abs=1e-4)


def test_two_adapters_in_a_row_with_requests_before_during_and_after(engine, subject):
    """Each token has the log-probability and the version of the adapter that made it; KV of before is read on."""
    first = engine.version
    before = generate(engine, request("before", LONG_PROMPT, tokens=6))["before"]
    engine.add([request("during", LONG_PROMPT, tokens=16)])
    for _ in range(8):
        engine.step()
    second = PolicyVersion(step=next(VERSIONS))
    engine.load(subject.weights[1], second)
    engine.add([request("after", LONG_PROMPT, tokens=6)])
    found = finish(engine) | {"before": before}
    for name, which in (("before", 0), ("after", 1)):
        tokens = [*LONG_PROMPT, *found[name].token_ids.tolist()]
        assert_is(found[name].logprobs, subject.logprobs(which, tokens)[len(LONG_PROMPT) - 1 :])
        assert found[name].versions.per_token_steps().tolist() == [(first, second)[which].step] * 6
    during, num_read = found["during"], len(LONG_PROMPT) + 7
    wanted = subject.mixed([*LONG_PROMPT, *during.token_ids.tolist()], [(0, num_read), (1, 8)])
    assert_is(during.logprobs, wanted[len(LONG_PROMPT) - 1 :])
    assert during.versions.per_token_steps().tolist() == [first.step] * 8 + [second.step] * 8
    apart = np.abs(subject.logprobs(0, [*PROMPT, 5, 6]) - subject.logprobs(1, [*PROMPT, 5, 6])).max()
    assert apart > 0.1, "the two adapters differ by far more than the tolerance"


def test_an_adapter_stays_until_its_last_user_ends(engine, subject):
    """Three versions in one step, each token by its own request's; what one has cached is found by no other."""
    versions = [engine.version, *(PolicyVersion(step=next(VERSIONS)) for _ in range(3))]
    assert engine.keeps_apart(subject.weights[1]) and not engine.keeps_apart(subject.base | subject.weights[1])
    for number, tokens in enumerate((24, 16, 20)):
        if number:
            engine.load_beside(subject.weights[number % 2], versions[number])
        engine.add([request(f"r{number}", LONG_PROMPT, n=2, tokens=tokens, seed=number)])
        for _ in range(4):
            engine.step()
    assert not engine.has_room()
    with pytest.raises(PolicyError, match="no place beside the adapters of the requests in flight"):
        engine.load_beside(subject.weights[1], versions[3])
    manifest = manifest_of(subject.weights[0], versions[2])
    check_fingerprint(manifest, engine.read, "policy_0")
    found = {}
    while not engine.has_room():
        found |= {result.id: result.completions for result in engine.step()}
    assert list(found) == ["r1"], "the shortest has ended, and its adapter's place is free"
    engine.load_beside(subject.weights[1], versions[3])
    engine.add([request("r3", LONG_PROMPT, n=2, tokens=8)])
    found |= finish(engine)
    for number, version in enumerate(versions):
        completions = found[f"r{number}"]
        assert set(completions.versions.per_token_steps().tolist()) == {version.step}
        for tokens, logprobs in zip(rows(completions), rows(completions, "logprobs"), strict=True):
            assert_is(logprobs, subject.logprobs(number % 2, [*LONG_PROMPT, *tokens])[len(LONG_PROMPT) - 1 :])


def test_one_that_is_cut_or_refused_gives_its_adapter_back(engine, subject):
    engine.add([request("a", tokens=20)])
    engine.load_beside(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    assert engine.add([request("long", LONG_PROMPT * 2)]).keys() == {"long"}
    engine.load_beside(subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    engine.add([request("b", tokens=20)])
    engine.step()
    assert engine.has_room(), "nobody has the second one"
    engine.load_beside(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    assert not engine.has_room()
    engine.cut(["a", "b"])
    assert engine.has_room() and not engine.num_unfinished()


def test_a_swap_that_rebuilds_kv_has_the_new_adapter_read_everything(engine, subject):
    engine.add([request("a", LONG_PROMPT, tokens=12)])
    for _ in range(6):
        engine.step()
    assert engine.load(subject.weights[1], PolicyVersion(step=next(VERSIONS)), keep_kv=False) > len(LONG_PROMPT)
    found = finish(engine)["a"]
    tokens = [*LONG_PROMPT, *found.token_ids.tolist()]
    assert_is(found.logprobs[6:], subject.logprobs(1, tokens)[len(LONG_PROMPT) + 5 :])


def test_what_is_served_is_told_by_the_manifests_digests(engine, subject):
    everything = subject.base | subject.weights[0]
    check_fingerprint(manifest_of(everything, engine.version), engine.read, "policy_0")
    other = manifest_of(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    with pytest.raises(FingerprintError, match=r"lora_A.weight as it is served differs"):
        check_fingerprint(other, engine.read, "policy_0")
    engine.load(subject.weights[1], other.version)
    check_fingerprint(other, engine.read, "policy_0")
    check_fingerprint(manifest_of(subject.base, engine.version), engine.read, "policy_0")


def test_weights_without_an_adapter_are_served_as_they_are(engine, subject):
    engine.load(subject.base, PolicyVersion(step=next(VERSIONS)))
    (tokens,) = rows(generate(engine, request(tokens=8))["a"])
    tokens = np.array([*PROMPT, *tokens], dtype=np.int32)
    assert_is(engine.score(tokens), subject.plain.logprobs(tokens))
    engine.load(subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    assert_is(engine.score(tokens), subject.logprobs(0, tokens))


@pytest.mark.parametrize("damage", ["shape", "dtype", "layer"])
def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_written(engine, subject, damage):
    weights, version = dict(subject.weights[1]), engine.version
    name = sorted(weights)[-1]
    if damage == "layer":
        weights[name.replace("v_proj", "k_proj")] = weights[name]
    else:
        weights[name] = weights[name][:-1] if damage == "shape" else weights[name].double()
    with pytest.raises(WeightsError, match=r"learner.lora is the same"):
        engine.load(weights, PolicyVersion(step=next(VERSIONS)))
    assert engine.version == version
    (tokens,) = rows(generate(engine, request(tokens=4))["a"])
    tokens = np.array([*PROMPT, *tokens], dtype=np.int32)
    assert_is(engine.score(tokens), subject.logprobs(0, tokens))
