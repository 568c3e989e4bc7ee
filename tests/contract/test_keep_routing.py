"""Routing that is kept: tokens take the same experts in the learner as they took while they were sampled."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge_async.core.records import Samples
from forge_async.core.routing import is_known
from forge_async.core.versions import PolicyVersion
from forge_async.policy.rows import Continuation
from forge_async.rollout.samples import samples_of_turn
from tests.child import Child
from tests.contract.test_learner import TitanSubject, assert_close, make_samples, share, weights_of
from tests.engines import LONG_PROMPT, PROMPT, VERSIONS, VllmSubject, finish, generate, request, rows
from tests.models import make_model, make_near_ties, read_weights, without_end

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two sets of weights of one mixture."""
    made = (make_model(tmp_path_factory.mktemp(f"moe{seed}"), "qwen3_moe", seed) for seed in (0, 1))
    return [without_end(folder) for folder in made]


@pytest.fixture(scope="module")
def recorder(mixture_child, folders):
    return VllmSubject(mixture_child, folders, keep_routing=True, kv_cache_bytes=1 << 20)


@pytest.fixture(scope="module")
def titan(folders, tmp_path_factory):
    child = Child(tmp_path_factory.mktemp("titan") / "log")
    yield TitanSubject(child, folders[0])
    child.close()


def loaded(subject, which=0, **how):
    subject.engine.load(subject.weights[which], PolicyVersion(step=next(VERSIONS)), **how)
    return subject.engine


def routed_rows(completions, prompt):
    """Of each completion the choices of its tokens and its prompt's, sorted."""
    ends = np.cumsum(completions.lengths + len(prompt))[:-1]
    return [np.sort(each, -1) for each in np.split(completions.routed_experts, ends)]


def assert_chosen_by(subject, which, completions, prompt, stop=None):
    """All tokens that were read took what transformers' routers choose, but for ties; the last one was not read."""
    for tokens, routed in zip(rows(completions), routed_rows(completions, prompt), strict=True):
        assert routed.dtype == np.uint8 and routed.shape == (len(prompt) + len(tokens), 2, 2)
        assert is_known(routed).tolist() == [True] * (len(routed) - 1) + [False]
        wanted, margins = subject.experts(which, [*prompt, *tokens])
        differ = (routed[:-1] != wanted[:-1]).any(-1) & (margins[:-1] > 1e-5)
        assert not differ[:stop].any(), np.argwhere(differ)


def test_each_tokens_experts_are_recorded_with_its_prompts(recorder):
    engine = loaded(recorder)
    prompts = {"a": PROMPT, "b": PROMPT[:3], "c": LONG_PROMPT}
    made = generate(engine, *(request(id, prompt, n=3, tokens=9, seed=7) for id, prompt in prompts.items()))
    for id, prompt in prompts.items():
        assert_chosen_by(recorder, 0, made[id], prompt)


def test_a_prompt_from_the_prefix_cache_has_its_experts_too(recorder):
    engine = loaded(recorder)
    first = generate(engine, request("a", LONG_PROMPT, tokens=4))["a"]
    generate(engine, *(request(f"between{i}", PROMPT[:-1] + (i + 5,), n=8, tokens=4) for i in range(6)))
    again = generate(engine, request("b", LONG_PROMPT, n=2, tokens=6, seed=3))["b"]
    assert_chosen_by(recorder, 0, again, LONG_PROMPT)
    assert first.routed_experts[:96].tolist() == again.routed_experts[:96].tolist()


def test_rows_that_end_early_keep_their_record_though_others_take_their_place(recorder):
    """Row by row ends differ, and the cache is so full that freed blocks are taken at once."""
    engine = loaded(recorder)
    stop = tuple(range(3, 30))
    made = generate(engine, *(request(f"r{i}", PROMPT, n=8, tokens=60, seed=64 * i, stop=stop) for i in range(8)))
    lengths = np.concatenate([each.lengths for each in made.values()])
    assert lengths.min() < 4 and lengths.max() > 8
    for each in made.values():
        assert_chosen_by(recorder, 0, each, PROMPT)


def test_preempted_rows_are_recorded_as_they_were_computed_again(recorder):
    engine = loaded(recorder)
    before = engine.occupancy().num_preemptions
    prompts = {f"r{i}": (1, i + 4, *LONG_PROMPT[:60]) for i in range(24)}
    made = generate(engine, *(request(id, prompt, n=2, tokens=50) for id, prompt in prompts.items()))
    assert engine.occupancy().num_preemptions > before
    for id, prompt in prompts.items():
        assert_chosen_by(recorder, 0, made[id], prompt)


@pytest.mark.parametrize("keep_kv", [True, False])
def test_a_swap_leaves_the_experts_of_kept_kv_and_renews_those_of_dropped(recorder, keep_kv):
    engine = loaded(recorder)
    engine.add([request("a", n=2, tokens=10)])
    for _ in range(5):
        engine.step()
    loaded(recorder, 1, keep_kv=keep_kv)
    made = finish(engine)["a"]
    if keep_kv:
        assert_chosen_by(recorder, 0, made, PROMPT, stop=len(PROMPT) + 4)
    else:
        assert_chosen_by(recorder, 1, made, PROMPT)


def test_what_is_cut_off_has_the_experts_of_what_it_read_and_goes_on_with_them(recorder):
    engine = loaded(recorder)
    engine.add([request("a", n=2, tokens=9), request("late", n=2)])
    for _ in range(4):
        engine.step()
    (late,) = engine.cut(["late"])
    (cut,) = engine.cut(["a"])
    assert late.completions.routed_experts is not None and cut.completions.lengths.tolist() == [4, 4]
    assert_chosen_by(recorder, 0, cut.completions, PROMPT)
    whole = Continuation(dataclasses.replace(request("a", n=2, tokens=9), prefix=cut.completions))
    engine.add(list(whole.parts.values()))
    while not whole.done:
        for result in engine.step():
            whole.add(result)
    assert whole.result().completions.lengths.tolist() == [9, 9]
    assert_chosen_by(recorder, 0, whole.result().completions, PROMPT)


def test_what_never_began_has_no_known_experts(recorder):
    engine = loaded(recorder)
    engine.add([request("a", n=2)])
    (result,) = engine.cut(["a"])
    assert result.completions.routed_experts.shape == (2 * len(PROMPT), 2, 2)
    assert not is_known(result.completions.routed_experts).any()


def sampled(subject, *, weights=None, num_prompts=4, n=4, tokens=24):
    subject.engine.load(weights or subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    prompts = [PROMPT[: 3 + i] for i in range(num_prompts)]
    asked = [request(str(i), prompt, n=n, seed=4096 * i, tokens=tokens) for i, prompt in enumerate(prompts)]
    made = generate(subject.engine, *asked)
    signs = np.resize(np.array([1.0, -1.0], np.float32), n)
    return Samples.concat(
        [samples_of_turn(np.array(prompt, np.int32), made[str(i)], signs) for i, prompt in enumerate(prompts)]
    )


def forgotten(samples):
    return dataclasses.replace(samples, routed_experts=None)


def test_with_unchanged_weights_the_ratio_is_one(recorder, titan):
    samples = sampled(recorder)
    assert samples.routed_experts.nbytes == 4 * samples.num_tokens
    result = titan.make().train(share(samples))
    assert result.logprob_diff_max < 1e-5 and result.clip_fraction == 0
    assert 1 / 8 < result.figures["router/share_max"] < 1
    assert 0 < result.figures["router/entropy_fraction"] < 1


def test_forcing_what_the_routers_would_choose_anyway_changes_no_gradient(recorder, titan):
    samples = sampled(recorder)
    found = []
    for batch in (samples, forgotten(samples)):
        learner = titan.make(lr=1e-4)
        found.append((learner.train(share(batch)), weights_of(learner)))
    (kept, weights), (free, other) = found
    assert kept.grad_norm == pytest.approx(free.grad_norm, rel=1e-5)
    assert_close(weights, other)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"activation_checkpointing": "full"}, {}),
        ({"activation_checkpointing": "selective"}, {}),
        ({}, {"row_tokens": 8, "micro_batch_tokens": 40}),
    ],
    ids=["computed_again", "partly_computed_again", "laid_out_otherwise"],
)
def test_other_experts_are_taken_when_forced_and_the_routers_learn_from_it(titan, settings, layout):
    """Every token is sent where its own router would not send it; recomputing and laying out anew change nothing."""
    samples = make_samples()
    experts = np.random.default_rng(0).permuted(np.tile(np.arange(8), (samples.num_tokens, 2, 1)), axis=-1)[..., :2]
    forced = dataclasses.replace(samples, routed_experts=experts.astype(np.uint8))
    plain = titan.make(lr=1e-4)
    before, free = weights_of(plain), plain.train(share(samples))
    found = []
    for how, laid in (({}, {}), (settings, layout)):
        learner = titan.make(lr=1e-4, **how)
        found.append((learner.train(share(forced, **laid)), weights_of(learner)))
    (one, weights), (other, others) = found
    assert abs(one.loss - free.loss) > 1e-3
    assert other.loss == pytest.approx(one.loss, rel=1e-5) and other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert other.figures == pytest.approx(one.figures, rel=1e-4, abs=1e-6)
    assert_close(weights, others)
    for layer in (0, 1):
        gate = f"model.layers.{layer}.mlp.gate.weight"
        assert bool((weights[gate] != before[gate]).any(1).all()), "every expert's row"


def test_where_experts_nearly_tie_the_ratio_is_one_with_the_routing_and_far_from_it_without(recorder, tmp_path, titan):
    folder = without_end(make_near_ties(tmp_path / "ties"))
    samples = sampled(recorder, weights=read_weights(folder))
    learner = TitanSubject(titan._child, folder).make
    kept, free = (learner().train(share(batch)) for batch in (samples, forgotten(samples)))
    assert kept.logprob_diff_max < 1e-5, "back to rounding"
    assert free.logprob_diff_max > 0.1, "lost without"
    assert free.mismatch_kl > 1e4 * kept.mismatch_kl


def test_in_bfloat16_the_mismatch_returns_to_rounding_with_the_routing(mixture_child, titan, folders):
    """A dense model of this size differs by up to 0.05 in bfloat16."""
    subject = VllmSubject(mixture_child, folders[:1], keep_routing=True, dtype="bfloat16")
    weights = {name: tensor.bfloat16() for name, tensor in read_weights(folders[0]).items()}
    samples = sampled(subject, weights=weights, num_prompts=5, n=8)
    learner = titan.make
    kept, free = (learner(dtype="bfloat16").train(share(batch)) for batch in (samples, forgotten(samples)))
    assert kept.logprob_diff_max < 0.1 and free.logprob_diff_max > 0.3
    assert free.mismatch_kl > 3 * kept.mismatch_kl


def test_a_dense_model_has_no_routing_to_keep(mixture_child, tmp_path):
    from forge_async.core.errors import PolicyError

    with pytest.raises(PolicyError, match=r"policy\.keep_routing=true needs a mixture of experts"):
        mixture_child.build("tests.backends:vllm_engine", str(make_model(tmp_path / "dense")), keep_routing=True)
