"""The run-length code against the naive list of one (step, incarnation) a token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.versions import NOT_SAMPLED, PolicyVersion, VersionRuns

tokens = st.lists(st.tuples(st.integers(NOT_SAMPLED, 3), st.integers(0, 2)), max_size=30)
versions = st.builds(
    PolicyVersion, policy=st.text(max_size=8), incarnation=st.integers(0, 9**9), step=st.integers(0, 9**9)
)


def coded(each):
    return VersionRuns.of((1, step, incarnation) for step, incarnation in each)


def expanded(runs):
    columns = zip(runs.lengths.tolist(), runs.steps.tolist(), runs.incarnations.tolist(), strict=True)
    return [(step, incarnation) for length, step, incarnation in columns for _ in range(length)]


@given(versions)
def test_a_version_survives_its_text(version):
    assert PolicyVersion.parse(str(version)) == version


@given(tokens)
def test_coding_loses_nothing_and_every_run_is_as_long_as_it_can_be(each):
    runs = coded(each)
    assert expanded(runs) == each
    assert runs.num_tokens == len(each)
    assert runs.per_token_steps().tolist() == [step for step, _ in each]
    assert (runs.lengths > 0).all()
    changes = sum(a != b for a, b in zip(each, each[1:], strict=False))
    assert len(runs.lengths) == changes + bool(each)


@given(tokens, st.integers(0, 40), st.integers(0, 40))
def test_a_slice_is_the_slice_of_the_list(each, start, stop):
    assert expanded(coded(each).slice(start, stop)) == each[start:stop]


@given(tokens, st.data())
def test_taking_tokens_is_indexing_the_list(each, data):
    chosen = data.draw(st.lists(st.integers(0, len(each) - 1), max_size=40)) if each else []
    taken = coded(each).take(np.asarray(chosen, dtype=np.int64))
    assert taken.lengths.dtype == taken.steps.dtype == taken.incarnations.dtype == "int32"
    expected = [each[index] for index in chosen]
    assert expanded(taken) == expected
    assert len(taken.lengths) == len(coded(expected).lengths)


@given(st.lists(tokens, max_size=5))
def test_concatenation_lays_the_lists_end_to_end(parts):
    whole = VersionRuns.concat([coded(part) for part in parts])
    assert expanded(whole) == [token for part in parts for token in part]
    assert whole.lengths.dtype == whole.steps.dtype == whole.incarnations.dtype == "int32"


@given(tokens)
def test_the_oldest_step_is_the_smallest_that_was_sampled(each):
    sampled = [step for step, _ in each if step != NOT_SAMPLED]
    assert coded(each).oldest_step() == (min(sampled) if sampled else None)


@given(st.lists(tokens, max_size=6), st.integers(1, 4) | st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_prompts_are_put_before_each_row(rows, num_prompt):
    axis = coded([token for row in rows for token in row])
    each = [num_prompt] * len(rows) if isinstance(num_prompt, int) else num_prompt[: len(rows)]
    given = num_prompt if isinstance(num_prompt, int) else np.array(each, dtype=np.int32)
    spread = axis.behind_prompts(np.array([len(row) for row in rows], dtype=np.int32), given)
    assert expanded(spread) == [
        token for row, num in zip(rows, each, strict=True) for token in ([(NOT_SAMPLED, 0)] * num) + list(row)
    ]
    assert (spread.lengths > 0).all()
    assert spread.lengths.dtype == spread.steps.dtype == spread.incarnations.dtype == "int32"
