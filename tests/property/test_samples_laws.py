"""Samples of many groups, laid out in one pass, against their definition token by token."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.records import Completions
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.rollout.samples import samples_of_turns

completion = st.lists(st.tuples(st.integers(0, 90), st.sampled_from([(3, 0), (4, 0), (4, 1)])), max_size=4)
"""(token id, (step, incarnation) that made it) of each token."""


@st.composite
def groups(draw):
    """A prompt, its completions, an advantage of each, and whether kept sets and experts were recorded."""
    prompt = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    rows = draw(st.lists(completion, min_size=1, max_size=4))
    return prompt, rows, draw(st.sampled_from([None, 1, 3])), draw(st.booleans())


def built(group):
    prompt, rows, width, routed = group
    flat = [token for row in rows for token in row]
    kept = None
    if width is not None:
        kept = np.arange(len(flat) * width, dtype=np.int32).reshape(-1, width)
        kept[::3] = -1  # too many to be recorded
    num_routed = len(prompt) * len(rows) + len(flat)
    completions = Completions(
        lengths=np.array([len(row) for row in rows], np.int32),
        token_ids=np.array([id for id, _ in flat], np.int32),
        logprobs=-np.arange(1, len(flat) + 1, dtype=np.float32),
        versions=VersionRuns.of((1, *version) for _, version in flat),
        truncated=np.zeros(len(rows), bool),
        cut=np.zeros(len(rows), bool),
        kept_set=kept,
        routed_experts=np.arange(num_routed, dtype=np.int16).reshape(-1, 1, 1) if routed else None,
    )
    return np.array(prompt, np.int32), completions, np.arange(1, len(rows) + 1, dtype=np.float32) / 2


@given(st.lists(groups(), max_size=5))
def test_each_group_has_its_prompt_before_each_completion_and_what_was_recorded_of_it(all_groups):
    made = samples_of_turns(*zip(*map(built, all_groups), strict=True)) if all_groups else samples_of_turns([], [], [])
    assert len(made) == len(all_groups)
    for samples, group in zip(made, all_groups, strict=True):
        prompt, rows, width, _ = group
        _, completions, advantages = built(group)
        assert samples.lengths.tolist() == [len(prompt) + len(row) for row in rows]
        place, token = 0, 0
        steps = samples.versions.per_token_steps()
        for row, advantage in zip(rows, advantages, strict=True):
            behind = place + len(prompt)
            assert samples.token_ids[place:behind].tolist() == prompt
            assert (steps[place:behind] == NOT_SAMPLED).all()
            assert not samples.loss_mask[place:behind].any()
            for offset, (id, (step, _)) in enumerate(row):
                at, known = behind + offset, width is None or token % 3 != 0
                assert (samples.token_ids[at], steps[at], samples.loss_mask[at]) == (id, step, known)
                assert samples.logprobs[at] == (completions.logprobs[token] if known else 0)
                assert samples.advantages[at] == (advantage if known else 0)
                if width is not None:
                    assert samples.kept_set[at].tolist() == completions.kept_set[token].tolist()
                token += 1
            place = behind + len(row)
        assert place == samples.num_tokens == samples.versions.num_tokens
        assert not samples.logprobs[~samples.loss_mask].any()
        assert not samples.advantages[~samples.loss_mask].any()
        assert (samples.kept_set is None) == (width is None)
        assert samples.routed_experts is completions.routed_experts or (
            samples.routed_experts.tolist() == completions.routed_experts.tolist()
        )


@given(st.lists(groups(), min_size=1, max_size=5))
def test_groups_together_are_the_groups_one_by_one(all_groups):
    inputs = list(map(built, all_groups))
    together = samples_of_turns(*zip(*inputs, strict=True))
    for samples, each in zip(together, inputs, strict=True):
        (alone,) = samples_of_turns(*([part] for part in each))
        for name in ("lengths", "token_ids", "loss_mask", "logprobs", "advantages"):
            one, other = getattr(samples, name), getattr(alone, name)
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)
        for name in ("lengths", "steps", "incarnations"):
            np.testing.assert_array_equal(getattr(samples.versions, name), getattr(alone.versions, name))
