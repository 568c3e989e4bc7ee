"""Turns of samples: found in the records, and given their advantages, token by token into the loss's rows."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ForgeError
from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.learner.batch import lay_out_samples
from forge_async.learner.layout import Layout
from forge_async.learner.rows import build_micro_batches
from forge_async.reward.turn_advantages import turn_advantages
from forge_async.rollout.turns import turn_spans, with_turn_advantages

dialogues = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)
"""Of each rollout the lengths of its turns."""


def samples_of(dialogues, prompt_tokens=2, answer_tokens=1):
    """A prompt, then turns with answers of the environment between them; each turn of the version of its number."""
    runs = []
    for turns in dialogues:
        runs.append((prompt_tokens, NOT_SAMPLED, 0))
        for number, count in enumerate(turns):
            runs += [(answer_tokens, NOT_SAMPLED, 0)] * bool(number) + [(count, number, 0)]
    versions = VersionRuns.of(runs)
    mask = versions.per_token_steps() != NOT_SAMPLED
    lengths = [prompt_tokens + sum(turns) + answer_tokens * (len(turns) - 1) for turns in dialogues]
    return Samples(
        lengths=np.array(lengths, dtype=np.int32),
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        advantages=np.zeros(len(mask), np.float32),
        versions=versions,
    )


@given(dialogues, st.integers(1, 3), st.integers(1, 3))
def test_every_turn_is_found_where_it_lies(dialogues, prompt_tokens, answer_tokens):
    samples = samples_of(dialogues, prompt_tokens, answer_tokens)
    steps, spans = samples.versions.per_token_steps(), turn_spans(samples)
    assert [[stop - start for start, stop in each] for each in spans] == dialogues
    for each in spans:
        for number, (start, stop) in enumerate(each):
            assert set(steps[start:stop]) == {number}


@given(dialogues, st.integers(1, 2), st.randoms())
def test_advantages_of_turns_reach_their_tokens_in_the_learners_rows(dialogues, num_ranks, random):
    rewards = [np.array([random.random() for _ in turns]) for turns in dialogues]
    advantages = turn_advantages(rewards, discount=0.5, baseline="none", scale="none")
    samples = with_turn_advantages(samples_of(dialogues), advantages)
    assert not samples.advantages[~samples.loss_mask].any()
    found = {}
    ranks, skipped = lay_out_samples(samples, Layout(row_tokens=16, micro_batch_tokens=64), num_ranks)
    for batches in ranks:
        for rows in build_micro_batches(samples, batches, skipped):
            for token, advantage in zip(rows.targets[rows.mask > 0], rows.advantages[rows.mask > 0], strict=True):
                found[int(token)] = float(advantage)
    for spans, given_advantages in zip(turn_spans(samples), advantages, strict=True):
        for (start, stop), advantage in zip(spans, given_advantages, strict=True):
            assert [found[token] for token in range(start, stop)] == [float(advantage)] * (stop - start)


def test_a_turn_of_tokens_that_are_not_all_trained_on_is_one_turn():
    samples = samples_of([[3], [2]])
    mask = samples.loss_mask.copy()
    mask[3] = False  # its kept set was too large to be recorded
    found = with_turn_advantages(dataclasses.replace(samples, loss_mask=mask), [np.array([2.0]), np.array([-1.0])])
    assert found.advantages.tolist() == [0, 0, 2, 0, 2, 0, 0, -1, -1]


def test_another_number_of_turns_is_refused():
    with pytest.raises(ForgeError, match="Sample 1 has 2 turns, and 1 advantages"):
        with_turn_advantages(samples_of([[1], [1, 1]]), [np.array([1.0]), np.array([1.0])])
