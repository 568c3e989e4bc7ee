import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ForgeError
from forge_async.core.records import Group, PromptId, Samples
from tests.strategies import make_group, make_samples

COLUMNS = ("token_ids", "loss_mask", "logprobs", "advantages")
sample_steps = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6)


def rows(samples):
    """Each sample apart, as plain lists."""
    edges = samples.bounds()
    steps = samples.versions.per_token_steps()
    columns = [*(getattr(samples, name) for name in COLUMNS), steps]
    return [tuple(column[a:b].tolist() for column in columns) for a, b in zip(edges[:-1], edges[1:], strict=True)]


@given(sample_steps, st.data())
def test_select_gives_the_samples_in_the_order_asked(steps, data):
    samples = make_samples(steps, prompt_tokens=2)
    wanted = data.draw(st.lists(st.integers(0, len(steps) - 1), max_size=8))
    chosen = samples.select(wanted)
    each = rows(samples)
    assert rows(chosen) == [each[row] for row in wanted]
    assert chosen.num_tokens == sum(len(each[row][0]) for row in wanted)


@given(st.lists(sample_steps, min_size=1, max_size=4))
def test_concat_lays_samples_end_to_end(parts):
    parts = [make_samples(steps) for steps in parts]
    whole = Samples.concat(parts)
    assert rows(whole) == [row for part in parts for row in rows(part)]
    assert len(whole) == sum(map(len, parts))
    assert whole.num_loss_tokens == sum(part.num_loss_tokens for part in parts)


@given(sample_steps)
def test_the_oldest_step_of_a_sample_is_that_of_its_oldest_sampled_token(steps):
    never = np.iinfo(np.int32).max
    assert make_samples(steps).oldest_steps().tolist() == [min(each, default=never) for each in steps]


def test_a_group_is_as_old_as_its_oldest_token():
    group = make_group(3, PromptId(source="s", epoch=0, index=3), [[4, 4], [5, 3], [6]])
    assert group.oldest_step() == 3
    assert str(group.prompt_id) == "s:0:3"


def test_no_samples_have_no_oldest_step():
    assert make_samples([[1]]).select([]).oldest_steps().tolist() == []


def test_optional_columns_travel_with_the_samples():
    samples = make_samples([[1, 1], [2]])
    kept = np.arange(samples.num_tokens * 2, dtype=np.int32).reshape(-1, 2)
    samples = dataclasses.replace(samples, kept_set=kept, routed_experts=kept.astype(np.uint8)[:, None])
    assert samples.select([1]).kept_set.tolist() == kept[3:].tolist()
    assert Samples.concat([samples, samples]).routed_experts.shape == (2 * samples.num_tokens, 1, 2)


def test_optional_columns_are_recorded_for_all_or_for_none():
    samples = make_samples([[1]])
    with_set = dataclasses.replace(samples, kept_set=np.zeros((2, 1), np.int32))
    with pytest.raises(ForgeError, match="with and without kept_set"):
        Samples.concat([samples, with_set])


def test_nothing_to_concatenate_is_an_error():
    with pytest.raises(ForgeError, match="at least one part"):
        Samples.concat([])


def test_a_batch_is_a_few_buffers_when_it_travels():
    import pickle

    samples = Samples.concat([make_samples([[1] * 50] * 8) for _ in range(64)])
    group = Group(index=0, prompt_id=PromptId(source="s", epoch=0, index=0), samples=samples, rewards=np.zeros(512))
    bytes_per_token = len(pickle.dumps(group, protocol=5)) / samples.num_tokens
    assert bytes_per_token < 14


def test_what_frozen_models_gave_goes_with_its_tokens():
    samples = make_samples([[1, 1], [2], [3] * 4])
    numbered = dataclasses.replace(samples, reference_logprobs=np.arange(samples.num_tokens, dtype=np.float32))
    together = Samples.concat([numbered.select([2, 0]), numbered.select([1])])
    assert together.reference_logprobs.tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert together.teacher_logprobs is None
    with pytest.raises(ForgeError, match="with and without reference_logprobs cannot be laid together"):
        Samples.concat([numbered, samples])
