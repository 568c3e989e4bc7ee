"""Completions taken apart into rows and put together again, at any cut."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.records import Completions
from forge_async.core.versions import VersionRuns
from forge_async.policy.ports import GenerationRequest, GenerationResult, Sampling
from forge_async.policy.rows import Continuation, completions_of, continued_seed, rows_of, without_cut_rows


@st.composite
def completions(draw, max_tokens=6):
    lengths = draw(st.lists(st.integers(0, max_tokens - 1), min_size=1, max_size=5))
    total = sum(lengths)
    steps = draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    width = draw(st.integers(1, 3))
    routed = np.arange((total + 2 * len(lengths)) * 2, dtype=np.uint8).reshape(-1, 2, 1)  # of 2 tokens of prompt too
    flags = st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))
    return Completions(
        lengths=np.array(lengths, dtype=np.int32),
        token_ids=np.arange(total, dtype=np.int32),
        logprobs=-np.arange(total, dtype=np.float32),
        versions=VersionRuns.of((1, step, 0) for step in steps),
        truncated=np.array(draw(flags)),
        cut=np.array(draw(flags)),
        kept_set=np.arange(total * width, dtype=np.int32).reshape(total, width) if draw(st.booleans()) else None,
        routed_experts=routed if draw(st.booleans()) else None,
    )


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("lengths", "token_ids", "logprobs", "truncated", "cut", "kept_set", "routed_experts")
    ) and np.array_equal(one.versions.per_token_steps(), other.versions.per_token_steps())


def read_again(num_tokens):
    """Routed experts of so many tokens that were read, and of one that was not."""
    return np.array([7] * 2 * num_tokens + [255] * 2, dtype=np.uint8).reshape(-1, 2, 1)


def asked(made, max_new_tokens=6):
    return GenerationRequest(
        id="a~1",
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        num_samples=len(made.lengths),
        seed=4096,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        prefix=made,
    )


@given(completions())
def test_rows_put_together_are_the_completions(made):
    assert same(completions_of(rows_of(made)), made)


@given(completions())
def test_emptying_cut_rows_touches_no_other(made):
    kept = without_cut_rows(made)
    assert (kept.lengths == np.where(made.cut, 0, made.lengths)).all()
    assert (kept.cut == made.cut).all()
    for before, after in zip(rows_of(made), rows_of(kept), strict=True):
        assert before.cut or before.token_ids.tolist() == after.token_ids.tolist()
    if made.kept_set is not None and not made.cut.all():
        assert kept.kept_set.tolist() == made.kept_set[np.repeat(~made.cut, made.lengths)].tolist()


@given(completions())
def test_parts_ask_for_what_is_missing_and_come_back_in_their_rows(made):
    whole = Continuation(asked(made))
    assert len(whole.parts) == made.cut.sum()
    for part in list(whole.parts.values()):
        number = int(part.id.split("#")[1])
        given_tokens = made.rows()[number].tolist()
        assert part.prompt_token_ids.tolist() == [1, 2, *given_tokens]
        assert part.sampling.max_new_tokens == 6 - len(given_tokens)
        assert part.seed == continued_seed(4096 + number, len(given_tokens))
        answer = Completions(
            lengths=np.array([1], dtype=np.int32),
            token_ids=np.array([90 + number], dtype=np.int32),
            logprobs=np.array([-9.0], dtype=np.float32),
            versions=VersionRuns.of([(1, 7, 0)]),
            truncated=np.array([False]),
            cut=np.array([False]),
            kept_set=None if made.kept_set is None else np.array([[90, 91, 92, 93]], dtype=np.int32),
            routed_experts=read_again(2 + len(given_tokens)) if made.routed_experts is not None else None,
        )
        whole.add(GenerationResult(id=part.id, completions=answer))
    assert whole.done
    result = whole.result().completions
    for number, row in enumerate(result.rows()):
        assert row.tolist() == made.rows()[number].tolist() + [90 + number] * bool(made.cut[number])
    assert not result.cut.any()
    assert result.versions.num_tokens == len(result.token_ids) == len(result.logprobs)
    assert (result.kept_set is None) == (made.kept_set is None)
    for row, before in zip(rows_of(result), rows_of(made), strict=True):
        again = read_again(2 + len(before.token_ids)) if before.cut else before.routed_experts
        assert (row.routed_experts is None) == (made.routed_experts is None)
        assert row.routed_experts is None or row.routed_experts.tolist() == again.tolist()
    if result.kept_set is not None:
        is_new = result.token_ids >= 90
        assert result.kept_set[is_new].tolist() == [[90, 91, 92, 93]] * int(made.cut.sum())
        old = result.kept_set[~is_new]
        assert (old[:, : made.kept_set.shape[1]] == made.kept_set).all()
        assert (old[:, made.kept_set.shape[1] :] == -1).all()


@given(st.integers(0, 2**31), st.integers(0, 100))
def test_a_continuation_draws_another_stream(seed, num_tokens):
    again = continued_seed(seed, num_tokens)
    assert (again == seed) == (num_tokens == 0) and again >= 0


@given(completions())
def test_what_is_complete_asks_for_nothing(made):
    made = dataclasses.replace(made, cut=np.zeros(len(made.lengths), dtype=bool))
    whole = Continuation(asked(made))
    assert whole.done and same(whole.result().completions, made)
