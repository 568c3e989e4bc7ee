"""What was sampled is what is trained: kept sets of top-p and top-k, ends of completions, and the learner's ratio."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forge_async.core.records import Completions, Samples
from forge_async.core.versions import PolicyVersion
from forge_async.rollout.samples import samples_of_turn
from tests.contract.test_learner import free_port, share
from tests.engines import PROMPT, VERSIONS, VllmSubject, finish, generate, request, rows
from tests.fakes import FakeRenderer
from tests.models import make_model

pytestmark = pytest.mark.timeout(180)

WAYS = {
    "temperature_top_p_top_k": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.9, "top_k": 64},
    "top_k": {"top_k": 20},
    "all_of_the_vocabulary": {"top_p": 0.99999, "top_k": 98},
}
LEAVING_OUT = [name for name, way in WAYS.items() if "top_k" in way]


def reference_set(logits, *, temperature=1.0, top_p=1.0, top_k=0):
    """The ids that transformers' own warpers keep, and the log-probabilities over them."""
    import torch
    from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

    scores = torch.tensor(logits, dtype=torch.float32)[None] / temperature
    for warper in (TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)):
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    kept = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    return kept, scores[0].double().log_softmax(-1).numpy()


@pytest.mark.parametrize("way", LEAVING_OUT)
def test_the_kept_set_is_what_transformers_would_sample_from(engine, engine_subject, way):
    completions = generate(engine, request(n=3, tokens=20, **WAYS[way]))["a"]
    assert completions.kept_set.dtype == np.int32 and len(completions.kept_set) == len(completions.token_ids)
    sizes, places = set(), 0
    for tokens, sets, logprobs in zip(
        rows(completions), rows(completions, "kept_set"), rows(completions, "logprobs"), strict=True
    ):
        logits = engine_subject.logits(0, [*PROMPT, *tokens])[len(PROMPT) - 1 :]
        for at, token in enumerate(tokens):
            kept, wanted = reference_set(logits[at], **WAYS[way])
            found = [id for id in sets[at] if id >= 0]
            assert token in found and sorted(found) == kept
            assert found == sorted(found, key=lambda id, wanted=wanted: -wanted[id]), "likeliest first"
            assert logprobs[at] == pytest.approx(wanted[token], abs=1e-5)
            sizes.add(len(found))
            places += 1
    assert places == 60 and completions.kept_set.shape[1] == max(sizes)
    assert (len(sizes) > 1) == (way in ("top_p", "temperature_top_p_top_k")), sizes


def test_nothing_is_recorded_where_nothing_was_left_out(engine):
    assert generate(engine, request(temperature=0.7))["a"].kept_set is None


def test_greedy_has_no_kept_set_and_is_the_same_beside_those_that_have(engine):
    alone = generate(engine, request("greedy", temperature=0.0))["greedy"]
    company = generate(
        engine,
        request("b", n=4, top_k=5, tokens=9),
        request("greedy", temperature=0.0, top_k=3, top_p=0.5),
        request("c", n=2, tokens=9),
    )
    assert company["greedy"].kept_set is None and company["c"].kept_set is None
    assert company["greedy"].token_ids.tolist() == alone.token_ids.tolist()
    assert company["greedy"].logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    assert company["b"].kept_set.shape == (36, 5)


def test_what_is_cut_off_has_the_sets_of_what_it_made(engine):
    alone = generate(engine, request(n=2, tokens=8, top_k=7))["a"]
    engine.add([request(n=2, tokens=8, top_k=7), request("late", n=2, top_k=7)])
    (late,) = engine.cut(["late"])
    assert late.completions.lengths.tolist() == [0, 0]
    for _ in range(3):
        engine.step()
    (result,) = engine.cut(["a"])
    assert result.completions.lengths.tolist() == [3, 3]
    assert rows(result.completions, "kept_set") == [row[:3] for row in rows(alone, "kept_set")]


def test_each_token_has_the_set_of_the_version_that_made_it(engine, engine_subject):
    engine.add([request(tokens=6, top_k=4)])
    for _ in range(3):
        engine.step()
    engine.load(engine_subject.weights[1], PolicyVersion(step=next(VERSIONS)), keep_kv=False)
    completions = finish(engine)["a"]
    for which, places in ((0, range(3)), (1, range(3, 6))):
        logits = engine_subject.logits(which, [*PROMPT, *completions.token_ids.tolist()])[len(PROMPT) - 1 :]
        for at in places:
            assert sorted(completions.kept_set[at].tolist()) == reference_set(logits[at], top_k=4)[0]


def alike(weights, num_alike):
    """The weights with the rows of so many tokens equal in the embedding, and so in the tied head: their logits tie."""
    made = {name: tensor.clone() for name, tensor in weights.items()}
    for name in made:
        if name.endswith("embed_tokens.weight"):
            made[name][50 : 50 + num_alike] = made[name][50]
    return made


@pytest.mark.stack
@pytest.mark.parametrize("engine_subject", ["vllm"], indirect=True)
def test_tokens_that_tie_for_the_last_place_are_all_in_the_set(engine, engine_subject):
    engine.load(alike(engine_subject.weights[0], 12), PolicyVersion(step=next(VERSIONS)))
    completions = generate(engine, request(n=16, tokens=20, top_k=5))["a"]
    sizes = (completions.kept_set >= 0).sum(1)
    assert sizes.min() == 5 and sizes.max() > 5
    tied = set(range(50, 62))
    for token, kept in zip(completions.token_ids.tolist(), completions.kept_set.tolist(), strict=True):
        assert token in kept and len(tied & set(kept)) in (0, 12)


@pytest.mark.stack
@pytest.mark.parametrize("engine_subject", ["vllm"], indirect=True)
def test_a_token_whose_set_is_too_large_is_not_trained_on(engine, engine_subject):
    engine.load(alike(engine_subject.weights[0], 40), PolicyVersion(step=next(VERSIONS)))
    completions = generate(engine, request(n=16, tokens=20, top_k=5))["a"]
    unknown = completions.kept_set[:, 0] < 0
    assert unknown.any() and not unknown.all()
    assert (completions.kept_set[unknown] == -1).all() and np.isfinite(completions.logprobs).all()
    samples = samples_of_turn(np.array(PROMPT, np.int32), completions, np.ones(16, np.float32))
    assert samples.num_loss_tokens == (~unknown).sum()


def greedy(engine, prompt=PROMPT, **how):
    return generate(engine, request(prompt=prompt, temperature=0.0, **{"tokens": 12, **how}))["a"]


def test_a_completion_whose_first_token_ends_it_has_that_token_alone(engine):
    (tokens,) = rows(greedy(engine))
    completions = greedy(engine, stop=(tokens[0],))
    assert (rows(completions), completions.truncated.tolist()) == ([tokens[:1]], [False])
    samples = samples_of_turn(np.array(PROMPT, np.int32), completions, np.ones(1, np.float32))
    assert samples.lengths.tolist() == [len(PROMPT) + 1] and np.flatnonzero(samples.loss_mask).tolist() == [len(PROMPT)]


def test_a_stop_token_in_the_last_place_is_no_truncation(engine):
    (tokens,) = rows(greedy(engine))
    end = tokens.index(tokens[3]) + 1
    for tokens_at_most, truncated in ((end, False), (end + 1, False), (end - 1, True)):
        if tokens_at_most:
            completions = greedy(engine, stop=(tokens[3],), tokens=tokens_at_most)
            assert rows(completions) == [tokens[: min(tokens_at_most, end)]]
            assert completions.truncated.tolist() == [truncated]


def text_of(tokens):
    return FakeRenderer().decode(tokens)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(engine):
    made = rows(generate(engine, request(n=4, tokens=20))["a"])
    text = next(text_of(row[at : at + 2]) for row in made for at in (6,) if min(row[at : at + 2]) >= 3)
    ends = [next((end for end in range(1, 21) if text in text_of(row[:end])), 20) for row in made]
    assert min(ends) < 20
    completions = generate(engine, request(n=4, tokens=20, texts=("never said", text)))["a"]
    assert rows(completions) == [row[:end] for row, end in zip(made, ends, strict=True)]
    assert completions.truncated.tolist() == [text not in text_of(row) for row in made]
    assert not completions.cut.any() and engine.num_unfinished() == 0
    assert completions.versions.num_tokens == len(completions.logprobs) == sum(ends)


def test_a_stop_string_may_begin_in_what_was_made_before_but_not_in_the_prompt(engine):
    (tokens,) = rows(greedy(engine))
    assert min(tokens[3:5]) >= 3
    text = text_of(tokens[3:5])
    continued = [*PROMPT, *tokens[:4]]
    assert rows(greedy(engine, continued, tokens=3, texts=(text,), given=4)) == [tokens[4:5]]
    unaware = rows(greedy(engine, continued, tokens=3, texts=(text,)))[0]
    assert len(unaware) == 3 and unaware[0] == tokens[4]


def test_kept_sets_end_where_a_stop_string_does(engine):
    whole = generate(engine, request(n=2, tokens=20, top_k=6))["a"]
    text = text_of(rows(whole)[0][5:7])
    ended = generate(engine, request(n=2, tokens=20, top_k=6, texts=(text,)))["a"]
    for long, short in zip(rows(whole, "kept_set"), rows(ended, "kept_set"), strict=True):
        assert short == long[: len(short)]
    assert len(ended.kept_set) == ended.lengths.sum() < whole.lengths.sum()


@pytest.fixture(scope="module")
def ends(engine_child, tmp_path_factory):
    """A vLLM engine and a learner of the same model: one process for both would share threads, so each has its own."""
    from tests.child import Child

    folder = make_model(tmp_path_factory.mktemp("kept"))
    child = Child(tmp_path_factory.mktemp("titan") / "log")
    yield VllmSubject(engine_child, [folder]), child, folder
    child.close()


def sampled(subject, way, *, tokens=24, num_prompts=3, n=4) -> Samples:
    """What the engine draws with the first weights, as samples of advantages of both signs."""
    subject.engine.load(subject.weights[0], PolicyVersion(step=next(VERSIONS)))
    prompts = [PROMPT[: 3 + i] for i in range(num_prompts)]
    made: dict[str, Completions] = generate(
        subject.engine,
        *(request(str(i), prompt, n=n, seed=4096 * i, tokens=tokens, **way) for i, prompt in enumerate(prompts)),
    )
    signs = np.resize(np.array([1.0, -1.0, 0.5, -0.5], np.float32), n)
    return Samples.concat(
        [samples_of_turn(np.array(prompt, np.int32), made[str(i)], signs) for i, prompt in enumerate(prompts)]
    )


def learner_of(ends, **settings):
    _, child, folder = ends
    return child.build("tests.backends:titan_learner", str(folder), free_port(), **settings)


def test_without_kept_sets_the_samples_are_the_same(engine):
    """Evaluations ask for none. The log-probabilities are renormalised over them all the same."""
    asked = request("a", n=4, top_k=5, temperature=0.7, tokens=9)
    without = dataclasses.replace(asked, sampling=dataclasses.replace(asked.sampling, gives_kept_sets=False))
    with_sets, plain = generate(engine, asked)["a"], generate(engine, without)["a"]
    assert with_sets.kept_set is not None and plain.kept_set is None
    assert plain.token_ids.tolist() == with_sets.token_ids.tolist()
    assert plain.logprobs == pytest.approx(with_sets.logprobs, abs=1e-5)


@pytest.mark.stack
@pytest.mark.parametrize("way", WAYS)
def test_with_unchanged_weights_the_ratio_is_one(ends, way):
    samples = sampled(ends[0], WAYS[way])
    assert (samples.kept_set is not None) == (way in LEAVING_OUT)
    learner = learner_of(ends, temperature=WAYS[way].get("temperature", 1.0))
    result = learner.train(share(samples))
    assert result.num_loss_tokens > 100
    assert result.logprob_diff_max < 1e-5
    assert result.clip_fraction == 0
    if way in ("top_p", "top_k", "temperature_top_p_top_k"):
        whole = learner_of(ends, temperature=WAYS[way].get("temperature", 1.0))
        forgotten = whole.train(share(dataclasses.replace(samples, kept_set=None)))
        assert forgotten.logprob_diff_max > 1e-2, "the check can fail"


@pytest.mark.stack
def test_how_samples_with_kept_sets_are_laid_out_changes_nothing(ends):
    samples = sampled(ends[0], WAYS["temperature_top_p_top_k"])
    chosen = {"temperature": 0.7, "objective": {"entropy_weight": 0.01, "kl_weight": 0.1}, "lr": 1e-4}
    one = learner_of(ends, **chosen).train(share(samples, row_tokens=512))
    other = learner_of(ends, **chosen).train(share(samples, row_tokens=8, micro_batch_tokens=40))
    assert other.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-6)
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert other.figures == pytest.approx(one.figures, rel=1e-4, abs=1e-6)


@pytest.mark.stack
def test_an_end_token_that_is_also_the_padding_is_trained_on_where_it_was_sampled(ends):
    """Token 0 is what rows are padded with, and the tokenizer's padding; here it ends completions too."""
    samples = sampled(ends[0], {"stop": (0,), "top_k": 90}, n=24)
    last = samples.bounds()[1:] - 1
    ended = samples.token_ids[last] == 0
    assert ended.sum() > 3 and samples.loss_mask[last].all()
    assert int((samples.token_ids[samples.loss_mask] == 0).sum()) == ended.sum()
    results = [
        learner_of(ends, lr=1e-4).train(share(samples, **layout))
        for layout in ({"row_tokens": 128}, {"row_tokens": 8, "micro_batch_tokens": 8})
    ]
    for result in results:
        assert result.logprob_diff_max < 1e-5 and result.num_loss_tokens == samples.num_loss_tokens
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5, abs=1e-6)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-4)
