"""Generalised advantage estimation: by hand, against the sum of its definition, and over packed rows."""

import numpy as np
import pytest

from forge_async.learner.gae import gae, last_token_rewards


def one(values, rewards, mask=None, segments=None, gamma=0.9, lambda_=0.5):
    count = len(values)
    advantages, returns = gae(
        np.array([values], np.float32),
        np.array([rewards], np.float32),
        np.array([mask or [1] * count], np.float32),
        np.array([segments or [0] * count]),
        gamma=gamma,
        lambda_=lambda_,
    )
    return advantages[0], returns[0]


def test_three_tokens_by_hand():
    # delta: 0 + .9*2 - 1 = .8; 0 + .9*3 - 2 = .7; 5 - 3 = 2. A: 2; .7 + .45*2 = 1.6; .8 + .45*1.6 = 1.52.
    advantages, returns = one([1.0, 2.0, 3.0], [0.0, 0.0, 5.0])
    assert advantages == pytest.approx([1.52, 1.6, 2.0])
    assert returns == pytest.approx([2.52, 3.6, 5.0])


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.5, 1.0)])
def test_it_is_the_sum_that_defines_it(gamma, lambda_):
    rng = np.random.default_rng(0)
    values, rewards = rng.normal(size=7), rng.normal(size=7)
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    expected = [sum((gamma * lambda_) ** (k - t) * deltas[k] for k in range(t, 7)) for t in range(7)]
    advantages, returns = one(values.tolist(), rewards.tolist(), gamma=gamma, lambda_=lambda_)
    assert advantages == pytest.approx(expected, abs=1e-5)
    assert returns == pytest.approx(expected + values, abs=1e-5)


def test_with_lambda_1_the_return_is_what_was_earned_from_there_on():
    _, returns = one([0.3, -0.2, 0.9], [1.0, 2.0, 4.0], gamma=1.0, lambda_=1.0)
    assert returns == pytest.approx([7.0, 6.0, 4.0])


def test_samples_of_a_row_know_nothing_of_each_other_and_padding_gives_nothing():
    alone = [one([1.0, 2.0], [0.0, 3.0]), one([5.0], [1.0])]
    advantages, returns = one(
        [1.0, 2.0, 5.0, 9.0, 9.0], [0.0, 3.0, 1.0, 7.0, 7.0], mask=[1, 1, 1, 0, 0], segments=[0, 0, 1, 2, 2]
    )
    assert advantages == pytest.approx([*alone[0][0], *alone[1][0], 0, 0])
    assert returns == pytest.approx([*alone[0][1], *alone[1][1], 0, 0])


def test_what_an_environment_said_between_two_turns_is_stepped_over():
    gap = one([1.0, 8.0, 8.0, 2.0, 3.0], [0.0, 9.0, 9.0, 0.0, 5.0], mask=[1, 0, 0, 1, 1])
    plain = one([1.0, 2.0, 3.0], [0.0, 0.0, 5.0])
    assert gap[0][[0, 3, 4]] == pytest.approx(plain[0])
    assert gap[0][1] == gap[1][2] == 0


def test_the_reward_of_a_sample_stands_at_its_last_token_that_the_policy_made():
    rewards = np.array([[2.0, 2.0, 2.0, 3.0, 3.0, 0.0], [0.0] * 6], np.float32)
    mask = np.array([[1, 1, 0, 1, 1, 0], [0] * 6], np.float32)
    segments = np.array([[0, 0, 0, 1, 1, 2], [3] * 6])
    assert last_token_rewards(rewards, mask, segments).tolist() == [[0, 2, 0, 0, 3, 0], [0] * 6]
