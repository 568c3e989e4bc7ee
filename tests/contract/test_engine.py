"""What every Engine promises: the fake that unit tests use, and vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.core.errors import FingerprintError, PolicyError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.fingerprint import check_fingerprint
from tests.engines import LONG_PROMPT, PROMPT, VERSIONS, VllmSubject, finish, generate, request, rows
from tests.models import Reference, make_model, manifest_of, read_weights, without_end

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def subject(engine_subject):
    return engine_subject


def served(engine, names):
    return list(engine.read(names))


def test_a_request_gives_as_many_completions_as_asked(engine):
    completions = generate(engine, request(n=3, tokens=5))["a"]
    assert completions.lengths.tolist() == [5, 5, 5]
    assert completions.truncated.tolist() == [True] * 3
    assert completions.token_ids.dtype == np.int32
    assert completions.logprobs.dtype == np.float32
    assert len({tuple(row) for row in rows(completions)}) == 3
    assert engine.num_unfinished() == 0


def test_the_same_seed_gives_the_same_tokens_in_any_company(engine):
    alone = generate(engine, request(n=2, seed=40960))["a"]
    others = [request(f"b{i}", PROMPT[: 2 + i % 5], n=3, seed=7 * i) for i in range(8)]
    for company in (others[:2], others):
        again = generate(engine, *company[:1], request(n=2, seed=40960), *company[1:])["a"]
        assert again.token_ids.tolist() == alone.token_ids.tolist()
        assert again.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_completion_i_draws_from_the_seed_plus_i(engine):
    together = generate(engine, request(n=4, seed=8192))["a"]
    single = generate(engine, *(request(f"s{i}", seed=8192 + i) for i in range(4)))
    assert rows(together) == [single[f"s{i}"].token_ids.tolist() for i in range(4)]


def test_large_seeds_are_seeds_too(engine):
    seed = 2**31 - 4096
    assert rows(generate(engine, request(seed=seed))["a"]) == rows(generate(engine, request(seed=seed))["a"])


def test_log_probabilities_are_those_of_the_reference(engine, subject):
    results = generate(engine, *(request(f"r{i}", PROMPT[: 1 + i], n=2, seed=i * 4096, tokens=20) for i in range(6)))
    for i in range(6):
        for tokens, logprobs in zip(rows(results[f"r{i}"]), rows(results[f"r{i}"], "logprobs"), strict=True):
            wanted = subject.logprobs(0, [*PROMPT[: 1 + i], *tokens])[i:]
            assert logprobs == pytest.approx(wanted, abs=1e-5)


def test_log_probabilities_are_of_what_was_sampled_at_its_temperature(engine, subject):
    (tokens,), (logprobs,) = (rows(generate(engine, request(tokens=16, temperature=0.7))["a"], column)
                              for column in ("token_ids", "logprobs"))  # fmt: skip
    wanted = subject.logprobs(0, [*PROMPT, *tokens], temperature=0.7)[len(PROMPT) - 1 :]
    assert logprobs == pytest.approx(wanted, abs=1e-5)


def test_greedy_takes_the_likeliest_token_whatever_the_seed(engine, subject):
    (first,), (second,) = (rows(generate(engine, request(seed=seed, temperature=0.0))["a"]) for seed in (1, 2))
    assert first == second
    likeliest = [max(range(3, 98), key=lambda t: subject.logprobs(0, [*PROMPT, t])[-1])]
    assert first[0] in likeliest


def test_a_stop_token_ends_a_completion_and_belongs_to_it(engine):
    (tokens,) = rows(generate(engine, request(tokens=8, temperature=0.0))["a"])
    stop = tokens[3]
    end = tokens.index(stop) + 1
    completions = generate(engine, request(tokens=8, temperature=0.0, stop=(stop,)))["a"]
    assert rows(completions) == [tokens[:end]]
    assert completions.truncated.tolist() == [False]


def test_a_token_is_stamped_with_the_version_that_made_it(engine, subject):
    old, new = engine.version, PolicyVersion(incarnation=3, step=engine.version.step + 1)
    engine.add([request("a", n=2, tokens=10), request("b", PROMPT[:3], tokens=4), request("c", tokens=5)])
    found = {}
    for _ in range(4):
        found.update({result.id: result.completions for result in engine.step()})
    engine.load(subject.weights[1], new)
    assert engine.version == new
    found.update(finish(engine))
    after = generate(engine, request("d", tokens=3))["d"]
    versions = {id: each.versions for id, each in (found | {"d": after}).items()}
    runs = {id: list(zip(v.lengths, v.steps, v.incarnations, strict=True)) for id, v in versions.items()}
    assert runs == {
        "a": [(4, old.step, 0), (6, new.step, 3)] * 2,
        "b": [(4, old.step, 0)],
        "c": [(4, old.step, 0), (1, new.step, 3)],
        "d": [(3, new.step, 3)],
    }


def test_a_swap_keeps_what_the_old_version_remembered(engine, subject):
    engine.add([request(tokens=16)])
    for _ in range(8):
        engine.step()
    engine.load(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    completions = finish(engine)["a"]
    tokens = [*PROMPT, *completions.token_ids.tolist()]
    num_read = len(PROMPT) + 7  # the eighth token was made by the old version and is first read by the new one
    wanted = subject.mixed(tokens, [(0, num_read), (1, 8)])[len(PROMPT) - 1 :]
    assert completions.logprobs == pytest.approx(wanted, abs=1e-4)
    pure = subject.logprobs(0, tokens)[len(PROMPT) - 1 :]
    assert completions.logprobs[:8] == pytest.approx(pure[:8], abs=1e-4)
    assert np.abs(completions.logprobs[8:] - pure[8:]).max() > 1e-2


def test_no_version_is_served_from_what_another_one_cached(engine, subject):
    for _ in range(2):
        generate(engine, request(prompt=LONG_PROMPT, tokens=4))
    engine.add([request("slow", LONG_PROMPT, tokens=20)])
    engine.step()
    engine.load(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    finish(engine)
    for _ in range(2):
        completions = generate(engine, request(prompt=LONG_PROMPT, tokens=4))["a"]
        wanted = subject.logprobs(1, [*LONG_PROMPT, *completions.token_ids.tolist()])[len(LONG_PROMPT) - 1 :]
        assert completions.logprobs == pytest.approx(wanted, abs=1e-5)


def test_what_is_read_back_is_what_was_loaded(engine, subject):
    for which in (1, 0):
        engine.load(subject.weights[which], PolicyVersion(step=next(VERSIONS)))
        assert_serves(engine, subject.weights[which])
    assert served(engine, ["no.such.weight"]) == []


def test_a_fingerprint_tellsVERSIONS_apart(engine, subject):
    for which in (0, 1):
        manifest = manifest_of(subject.weights[which], engine.version)
        if which == 0:
            check_fingerprint(manifest, engine.read, "policy_0")
        else:
            with pytest.raises(FingerprintError, match="differs from what the learner published"):
                check_fingerprint(manifest, engine.read, "policy_0")


def test_a_score_is_the_log_probability_of_given_tokens(engine, subject):
    for tokens in (PROMPT, LONG_PROMPT, LONG_PROMPT):
        scored = engine.score(np.array(tokens, dtype=np.int32))
        assert scored.dtype == np.float32
        assert scored == pytest.approx(subject.logprobs(0, tokens), abs=1e-5)


def test_a_score_waits_for_nobody_and_nobody_goes_on_meanwhile(engine, subject):
    old, new = engine.version, PolicyVersion(step=next(VERSIONS))
    engine.add([request("a", n=64, tokens=12), request("b", n=8, tokens=4, seed=4096)])  # more than run at once
    for _ in range(3):
        engine.step()
    assert engine.score(np.array(LONG_PROMPT, dtype=np.int32)) == pytest.approx(
        subject.logprobs(0, LONG_PROMPT), abs=1e-5
    )
    engine.load(subject.weights[1], new)
    steps = finish(engine)["a"].versions.per_token_steps().reshape(64, 12)
    assert (steps == [old.step] * 3 + [new.step] * 9).all()


def test_a_score_that_finds_no_room_beside_others_gets_it_when_one_has_ended(engine, subject):
    prompts = [(number + 4, *LONG_PROMPT[1:]) for number in range(64)]
    asked = [request(f"r{number}", prompt, tokens=28, seed=number) for number, prompt in enumerate(prompts)]
    alone = generate(engine, *asked)
    engine.add(asked)
    for _ in range(20):
        engine.step()
    assert engine.score(np.array(LONG_PROMPT, dtype=np.int32)) == pytest.approx(
        subject.logprobs(0, LONG_PROMPT), abs=1e-5
    )
    found = finish(engine)
    assert {id: rows(each) for id, each in found.items()} == {id: rows(each) for id, each in alone.items()}


def test_scoring_loses_nothing_that_finishes_meanwhile(engine):
    alone = generate(engine, request("a", tokens=1), request("b", n=2, tokens=6, seed=4096))
    engine.add([request("a", tokens=1), request("b", n=2, tokens=6, seed=4096)])
    for _ in range(4):
        engine.score(np.array(PROMPT, dtype=np.int32))
    found = finish(engine)
    assert {id: rows(each) for id, each in found.items()} == {id: rows(each) for id, each in alone.items()}


def test_what_is_cut_off_comes_back_as_far_as_it_came(engine, subject):
    """Row 0 stops early: it is whole; the others are cut off."""
    alone = generate(engine, request("a", n=3, tokens=12))["a"]
    stop = rows(alone)[0][2]
    length = [row.index(stop) + 1 if stop in row[:6] else 6 for row in rows(alone)]
    engine.add([request("a", n=3, tokens=12, stop=(stop,)), request("b", tokens=8), request("c", tokens=20)])
    for _ in range(6):
        engine.step()
    found = {result.id: result.completions for result in engine.cut(["a", "c", "never heard of"])}
    assert sorted(found) == ["a", "c"]
    assert found["a"].lengths.tolist() == length
    assert found["a"].cut.tolist() == [end == 6 for end in length]
    assert not found["a"].truncated.any()
    assert rows(found["a"]) == [row[:end] for row, end in zip(rows(alone), length, strict=True)]
    for row, logprobs in zip(rows(found["a"]), rows(found["a"], "logprobs"), strict=True):
        assert logprobs == pytest.approx(subject.logprobs(0, [*PROMPT, *row])[len(PROMPT) - 1 :], abs=1e-5)
    assert found["a"].versions.per_token_steps().tolist() == [engine.version.step] * sum(length)
    assert (found["c"].lengths.tolist(), found["c"].cut.tolist()) == ([6], [True])
    left = finish(engine)
    assert (list(left), left["b"].cut.tolist()) == (["b"], [False])
    assert list(generate(engine, request("a", tokens=2))) == ["a"]


def test_what_is_cut_off_before_its_first_token_is_empty(engine):
    engine.add([request("a", n=2)])
    (result,) = engine.cut(["a"])
    assert (result.completions.lengths.tolist(), result.completions.cut.tolist()) == ([0, 0], [True, True])
    assert result.completions.versions.num_tokens == 0
    assert engine.num_unfinished() == 0


def test_a_request_that_cannot_be_served_is_refused_alone(engine):
    refused = engine.add([request("a"), request("big", LONG_PROMPT * 3), request("b")])
    assert list(refused) == ["big"]
    assert refused["big"]
    assert sorted(finish(engine)) == ["a", "b"]


def test_more_prompts_than_a_step_can_read_are_read_in_several(engine, subject):
    """15 prompts of 90 tokens, in steps of 1,024 tokens."""
    prompts = {f"r{i}": tuple((7 * i + 3 * k) % 90 + 4 for k in range(90)) for i in range(15)}
    results = generate(
        engine, *(request(id, prompt, tokens=4, seed=i) for i, (id, prompt) in enumerate(prompts.items()))
    )
    for id, prompt in prompts.items():
        wanted = subject.logprobs(0, [*prompt, *results[id].token_ids.tolist()])[len(prompt) - 1 :]
        assert results[id].logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("damage", ["shape", "dtype"])
def test_weights_that_do_not_fit_are_refused_before_anything_is_written(engine, subject, damage):
    weights, version = dict(subject.weights[1]), engine.version
    last = sorted(weights)[-1]
    weights[last] = weights[last][:-1] if damage == "shape" else weights[last].double()
    with pytest.raises(WeightsError, match=last):
        engine.load(weights, PolicyVersion(step=next(VERSIONS)))
    assert engine.version == version
    assert_serves(engine, subject.weights[0])
    assert list(generate(engine, request("a"))) == ["a"]


@pytest.mark.stack
@pytest.mark.parametrize("engine_subject", ["vllm"], indirect=True)
def test_a_load_that_breaks_off_leaves_an_engine_that_makes_and_scores_nothing(engine, subject):
    broken = subject.weights[1] | {"model.layers.0.no_such.weight": subject.weights[1]["model.norm.weight"]}
    with pytest.raises(ValueError, match="no_such"):
        engine.load(broken, PolicyVersion(step=next(VERSIONS)))
    with pytest.raises(PolicyError, match="parts of two versions, since the load of policy@0"):
        engine.step()
    with pytest.raises(PolicyError, match="parts of two versions"):
        engine.score(np.array(PROMPT, dtype=np.int32))
    engine.load(subject.weights[1], PolicyVersion(step=next(VERSIONS)))
    assert engine.score(np.array(PROMPT, dtype=np.int32)) == pytest.approx(subject.logprobs(1, PROMPT), abs=1e-5)


def test_how_full_the_engine_is_is_told(engine):
    idle = engine.occupancy()
    assert (idle.num_running, idle.num_waiting) == (0, 0)
    engine.add([request(f"r{i}", LONG_PROMPT, n=4, seed=4096 * i, tokens=10) for i in range(3)])
    engine.step()
    busy = engine.occupancy()
    assert (busy.num_running, busy.num_waiting, busy.num_preemptions) == (12, 0, idle.num_preemptions)
    assert 0 < busy.kv_usage <= 1


@pytest.mark.stack
@pytest.mark.parametrize("kind", ["qwen3_untied", "llama", "llama_untied"])
def test_vllm_serves_other_architectures_as_they_were_loaded(engine_child, tmp_path, kind):
    folder = make_model(tmp_path / kind, kind)
    threads = 2 if kind == "llama" else 1
    engine, weights = (
        engine_child.build("tests.backends:vllm_engine", str(folder), threads=threads),
        read_weights(folder),
    )
    assert engine.num_threads() == threads
    engine.load(weights, PolicyVersion(step=1))
    assert_serves(engine, weights)
    completions = generate(engine, request(tokens=16))["a"]
    wanted = Reference(folder).logprobs([*PROMPT, *completions.token_ids.tolist()])[len(PROMPT) - 1 :]
    assert completions.logprobs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.stack
def test_what_vllm_is_spared_changes_no_bit(engine_child, tmp_path):
    engine = engine_child.build("tests.backends:vllm_engine", str(without_end(make_model(tmp_path / "model"))))
    work = [
        request("a", n=3, seed=1, tokens=60),
        request("b", PROMPT[:3], n=2, seed=2**31 - 1, tokens=70, temperature=0.7),
        request("c", LONG_PROMPT, n=2, seed=9, tokens=20, top_k=5, top_p=0.9),
        request("d", seed=5, tokens=40, temperature=0.0),
    ]
    assert engine.count_allocations() == 0
    ours = generate(engine, *work)
    spared = engine.count_allocations()
    theirs = engine.generate_as_vllm_does(work)
    assert spared < engine.count_allocations() / 10
    assert ours.keys() == theirs.keys() == {"a", "b", "c", "d"}
    for id, made in ours.items():
        assert made.token_ids.tolist() == theirs[id].token_ids.tolist()
        assert made.logprobs.tobytes() == theirs[id].logprobs.tobytes()
    assert "does not draw as that of vLLM 0.32 does" in engine.refuses_another_way_to_draw()


@pytest.fixture(scope="module")
def sharing(engine_child, tmp_path_factory):
    """An engine in which rows share their prompts, and what its two sets of weights should give."""
    folders = [without_end(make_model(tmp_path_factory.mktemp(f"shared{seed}"), "qwen3", seed)) for seed in (0, 1)]
    made = VllmSubject(engine_child, folders)
    made.engine.load(made.weights[0], PolicyVersion(step=next(VERSIONS)))
    return made


@pytest.mark.stack
@pytest.mark.parametrize("length", [2, 7, 32, 33, 70])
def test_a_group_computes_its_prompt_once(sharing, length):
    engine, prompt = sharing.engine, LONG_PROMPT[:length]
    engine.load(sharing.weights[0], PolicyVersion(step=next(VERSIONS)))
    engine.count_computed_tokens()
    made = generate(engine, request("a", prompt, n=8, seed=length, tokens=4), request("b", (5, *prompt), n=1, tokens=4))
    assert engine.count_computed_tokens() == length + 7 + (length + 1) + 9 * 3
    assert engine.num_families() == 0
    assert made["a"].lengths.tolist() == [4] * 8
    for tokens, logprobs in zip(rows(made["a"]), rows(made["a"], "logprobs"), strict=True):
        wanted = sharing.logprobs(0, [*prompt, *tokens])[length - 1 :]
        assert logprobs == pytest.approx(wanted, abs=1e-5)
    single = generate(engine, *(request(f"s{i}", prompt, seed=length + i, tokens=4) for i in range(8)))
    assert rows(made["a"]) == [single[f"s{i}"].token_ids.tolist() for i in range(8)]


@pytest.mark.stack
@pytest.mark.parametrize("keep_kv", [True, False])
def test_a_prompt_is_not_shared_across_a_load(sharing, keep_kv):
    engine = sharing.engine
    engine.load(sharing.weights[0], PolicyVersion(step=next(VERSIONS)))
    crowd = [request(f"r{i}", (1, 4 + i, 9), n=8, seed=64 * i, tokens=4) for i in range(7)]
    engine.add([*crowd, request(n=16, tokens=6)])
    assert engine.step() == []
    assert engine.occupancy().num_waiting == 8, "the leader and seven others have entered"
    later = PolicyVersion(step=next(VERSIONS))
    engine.load(sharing.weights[1], later, keep_kv=keep_kv)
    made = finish(engine)["a"]
    steps = np.split(made.versions.per_token_steps(), 16)
    assert [row.tolist().count(later.step) for row in steps] == [5] * 8 + [6] * 8
    for tokens, logprobs in list(zip(rows(made), rows(made, "logprobs"), strict=True))[8:]:
        wanted = sharing.logprobs(1, [*PROMPT, *tokens])[len(PROMPT) - 1 :]
        assert logprobs == pytest.approx(wanted, abs=1e-5)
    assert engine.num_families() == 0


@pytest.mark.stack
def test_rows_that_wait_may_share_with_one_that_is_further_or_be_cut(sharing):
    engine = sharing.engine
    engine.load(sharing.weights[0], PolicyVersion(step=next(VERSIONS)))
    made = generate(engine, *(request(f"r{i}", (1, 4 + i, 9), n=8, seed=64 * i, tokens=2) for i in range(7)),
                    request("a", n=16, tokens=6))["a"]  # fmt: skip
    for tokens, logprobs in zip(rows(made), rows(made, "logprobs"), strict=True):
        assert logprobs == pytest.approx(sharing.logprobs(0, [*PROMPT, *tokens])[len(PROMPT) - 1 :], abs=1e-5)
    engine.add([request(f"r{i}", n=64, seed=64 * i, tokens=5) for i in range(2)])
    engine.step()
    cut = engine.cut(["r0", "r1"])
    assert [each.completions.lengths.tolist() for each in cut] == [[1] * 64, [0] * 64]
    assert engine.num_families() == engine.num_unfinished() == 0


@pytest.mark.stack
def test_shared_prompts_stand_rows_that_lose_their_kv(sharing, engine_child, tmp_path):
    folder = without_end(make_model(tmp_path / "model"))  # the first weights of `sharing`
    engine = engine_child.build("tests.backends:vllm_engine", str(folder), kv_cache_bytes=1 << 20)
    engine.load(sharing.weights[0], PolicyVersion(step=next(VERSIONS)))
    crowd = [request(f"r{i}", PROMPT[: 3 + i], n=8, seed=64 * i, tokens=90) for i in range(5)]
    made = generate(engine, *crowd)
    assert engine.occupancy().num_preemptions > 0
    assert engine.num_families() == 0
    for i in range(5):
        for tokens, logprobs in zip(rows(made[f"r{i}"]), rows(made[f"r{i}"], "logprobs"), strict=True):
            wanted = sharing.logprobs(0, [*PROMPT[: 3 + i], *tokens])[2 + i :]
            assert logprobs == pytest.approx(wanted, abs=1e-5)


def assert_serves(engine, weights):
    import torch

    read = dict(served(engine, sorted(weights)))
    assert sorted(read) == sorted(weights)
    for name, tensor in weights.items():
        assert torch.equal(read[name], tensor), name
