"""Advantages of turns: returns, peers, and that with one turn they are those of rollouts."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError, RewardError
from forge_async.reward.advantages import STD_EPSILON, group_advantages
from forge_async.reward.turn_advantages import PEERS, turn_advantages, turn_returns

reward = st.integers(-500, 500).map(lambda value: value / 100)
rollouts = st.lists(st.lists(reward, min_size=1, max_size=5).map(np.array), min_size=1, max_size=6)
discounts = st.sampled_from([0.0, 0.4, 0.9, 1.0])
baselines = st.sampled_from(["group_mean", "leave_one_out", "none"])
scales = st.sampled_from(["group_std", "none"])
peers = st.sampled_from(PEERS)


@given(rollouts, discounts)
def test_a_return_is_its_turns_reward_and_the_discounted_next_return(rewards, discount):
    for given_rewards, returns in zip(rewards, turn_returns(rewards, discount), strict=True):
        assert returns[-1] == given_rewards[-1]
        assert returns[:-1] == pytest.approx(given_rewards[:-1] + discount * returns[1:])


@given(st.lists(st.tuples(reward, st.integers(1, 5)), min_size=1, max_size=6), discounts)
def test_a_reward_at_the_end_reaches_each_turn_by_its_distance(ends, discount):
    rewards = [np.array([0.0] * (turns - 1) + [last]) for last, turns in ends]
    for (last, turns), returns in zip(ends, turn_returns(rewards, discount), strict=True):
        assert returns == pytest.approx([last * discount ** (turns - 1 - turn) for turn in range(turns)])


@given(st.lists(reward, min_size=1, max_size=8), discounts, peers, scales, baselines, st.booleans())
def test_of_one_turn_they_are_the_advantages_of_rollouts(rewards, discount, peers, scale, baseline, unbiased):
    assume(not (scale == "group_std" and baseline == "leave_one_out"))  # told apart below
    words = {"scale": scale, "baseline": baseline, "unbiased": unbiased}
    found = turn_advantages([np.array([each]) for each in rewards], discount=discount, peers=peers, **words)
    assert [each.shape for each in found] == [(1,)] * len(rewards)
    expected = group_advantages(np.array(rewards), **words)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-5)


@given(st.lists(reward, min_size=2, max_size=8))
def test_of_one_turn_leaving_out_the_rollout_is_leaving_one_out(rewards):
    for scale in ("group_std", "none"):
        found = turn_advantages(
            [np.array([each]) for each in rewards], peers="group", scale=scale, baseline="leave_one_out"
        )
        expected = group_advantages(np.array(rewards), scale, "leave_one_out")
        np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-4)


@given(rollouts, discounts, scales)
def test_peers_sum_to_zero(rewards, discount, scale):
    of_turns = turn_advantages(rewards, discount=discount, peers="turn", scale=scale)
    for turn in range(max(map(len, rewards))):
        assert sum(float(each[turn]) for each in of_turns if len(each) > turn) == pytest.approx(0, abs=1e-3)
    of_group = turn_advantages(rewards, discount=discount, peers="group", scale=scale)
    assert sum(float(each.sum(dtype=np.float64)) for each in of_group) == pytest.approx(0, abs=1e-3)


@given(rollouts, discounts, peers, scales, baselines, st.randoms())
def test_the_order_of_rollouts_does_not_matter(rewards, discount, peers, scale, baseline, random):
    order = list(range(len(rewards)))
    random.shuffle(order)
    words = {"discount": discount, "peers": peers, "scale": scale, "baseline": baseline}
    found, moved = turn_advantages(rewards, **words), turn_advantages([rewards[each] for each in order], **words)
    for place, each in enumerate(order):
        np.testing.assert_allclose(moved[place], found[each], rtol=1e-4, atol=1e-4)


@given(rollouts, discounts, peers, st.integers(0, 5), reward)
def test_leave_one_out_compares_with_the_others_only(rewards, discount, peers, which, more):
    which %= len(rewards)
    words = {"discount": discount, "peers": peers, "scale": "none", "baseline": "leave_one_out"}
    changed = [each + more if number == which else each for number, each in enumerate(rewards)]
    found, other = turn_advantages(rewards, **words), turn_advantages(changed, **words)
    returns, changed_returns = turn_returns(rewards, discount), turn_returns(changed, discount)
    for turn in range(len(rewards[which])):
        same = [each for number, each in enumerate(rewards) if number != which and len(each) > turn]
        alone = not same if peers == "turn" else len(rewards) == 1
        expected = 0 if alone else changed_returns[which][turn] - returns[which][turn]
        assert other[which][turn] - found[which][turn] == pytest.approx(expected, abs=1e-3)


def test_numbers_worked_out_by_hand():
    rewards = [np.array([0.0, 1.0]), np.array([1.0]), np.array([0.0, 0.0])]
    returns = turn_returns(rewards, 0.5)
    assert [each.tolist() for each in returns] == [[0.5, 1.0], [1.0], [0.0, 0.0]]
    plain = turn_advantages(rewards, discount=0.5, scale="none")
    assert [each.tolist() for each in plain] == [[0.0, 0.5], [0.5], [-0.5, -0.5]]
    deviation = np.std([1.0, 0.0], ddof=1) + STD_EPSILON
    assert turn_advantages(rewards, discount=0.5)[0][1] == pytest.approx(0.5 / deviation)
    pooled = turn_advantages(rewards, discount=0.5, peers="group", scale="none")
    assert [each.tolist() for each in pooled] == [[0.0, 0.5], [0.5], [-0.5, -0.5]], "the mean of all five is 0.5"
    others = turn_advantages(rewards, discount=0.5, peers="group", scale="none", baseline="leave_one_out")
    # The others' turns: of the first 1, 0, 0; of the second 0.5, 1, 0, 0; of the third 0.5, 1, 1.
    np.testing.assert_allclose(others[0], [0.5 - 1 / 3, 1 - 1 / 3], rtol=1e-6)
    np.testing.assert_allclose(others[1], [1 - 1.5 / 4], rtol=1e-6)
    np.testing.assert_allclose(others[2], [-2.5 / 3] * 2, rtol=1e-6)


def test_a_turn_that_no_other_rollout_reached_has_nothing_to_be_compared_with():
    (long, _) = turn_advantages([np.array([1.0, 5.0]), np.array([0.0])])
    assert long[0] > 0 and long[1] == 0


def test_bad_input_is_refused_in_one_sentence():
    with pytest.raises(ConfigError, match="from 0 to 1, not 1.5"):
        turn_returns([np.array([1.0])], 1.5)
    with pytest.raises(ConfigError, match="peers=all is not one of turn, group"):
        turn_advantages([np.array([1.0])], peers="all")
    with pytest.raises(RewardError, match="Rollout 1 has the rewards"):
        turn_returns([np.array([1.0]), np.array([])])
    with pytest.raises(RewardError, match="Rollout 0 has the rewards"):
        turn_returns([np.array([np.nan])])
