"""Advantages: centred, invariant to shifts, and 0 where a group teaches nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError
from forge_async.reward.advantages import (
    STD_EPSILON,
    group_advantages,
    is_zero_variance,
    judged,
    overlong_penalty,
    process_advantages,
    rollout_advantages,
    shaped_rewards,
)
from forge_async.reward.settings import AdvantageSettings

reward = st.integers(-1000, 1000).map(lambda value: value / 100)
groups = st.lists(reward, min_size=1, max_size=64).map(np.array)
scales = st.sampled_from(["group_std", "none"])


@given(groups, scales)
def test_advantages_of_a_group_sum_to_zero(rewards, scale):
    assert abs(group_advantages(rewards, scale).sum(dtype=np.float64)) < 1e-4


@given(groups, scales, reward)
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, scale, shift):
    np.testing.assert_allclose(group_advantages(rewards + shift, scale), group_advantages(rewards, scale), atol=1e-5)


@given(groups, st.floats(0.1, 10))
def test_without_division_advantages_scale_with_the_rewards(rewards, factor):
    scaled = group_advantages(rewards * factor, "none")
    np.testing.assert_allclose(scaled, group_advantages(rewards, "none") * factor, rtol=1e-5, atol=1e-5)


@given(groups.filter(lambda rewards: np.std(rewards) > 0.1), st.floats(1, 10))
def test_divided_by_the_deviation_advantages_hardly_depend_on_the_scale(rewards, factor):
    np.testing.assert_allclose(group_advantages(rewards * factor), group_advantages(rewards), rtol=2e-3, atol=1e-6)


@given(groups, scales)
def test_advantages_keep_the_order_of_rewards(rewards, scale):
    order = np.argsort(rewards, kind="stable")
    assert np.all(np.diff(group_advantages(rewards, scale)[order]) >= 0)


def test_the_formula_is_that_of_grpo():
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    expected = (rewards - 0.5) / (np.std(rewards, ddof=1) + STD_EPSILON)
    np.testing.assert_allclose(group_advantages(rewards), expected, rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, "none"), rewards - 0.5)
    assert group_advantages(rewards).dtype == np.float32


@pytest.mark.parametrize("scale", ["group_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_a_group_of_one_gets_advantage_zero(scale, baseline):
    assert group_advantages(np.array([0.7]), scale, baseline).tolist() == [0.0]


@given(groups.filter(lambda rewards: len(rewards) > 1))
def test_leaving_one_out_compares_each_reward_with_the_mean_of_the_others(rewards):
    expected = [each - np.delete(rewards, at).mean() for at, each in enumerate(rewards)]
    np.testing.assert_allclose(group_advantages(rewards, "none", "leave_one_out"), expected, atol=1e-5)


@given(groups)
def test_without_a_baseline_the_reward_is_the_advantage(rewards):
    np.testing.assert_allclose(group_advantages(rewards, "none", "none"), rewards, rtol=1e-6)


def test_the_deviation_is_the_samples_or_the_populations():
    rewards = np.array([0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(group_advantages(rewards, unbiased=False), (rewards - 0.5) / (0.5 + 1e-4), rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards), (rewards - 0.5) / (3**-0.5 + 1e-4), rtol=1e-6)


def test_a_penalty_for_length_falls_over_the_last_tokens_before_the_limit():
    assert overlong_penalty(np.array([1, 60, 70, 80, 100]), 100, 40).tolist() == [0, 0, -0.25, -0.5, -1]


def test_rewards_are_shaped_only_where_the_settings_ask_for_it():
    rewards, lengths = np.array([1.0, 1.0], np.float32), np.array([10, 100])
    assert shaped_rewards(rewards, lengths, 100, AdvantageSettings()) is rewards
    shaped = shaped_rewards(rewards, lengths, 100, AdvantageSettings(overlong_tokens=50, overlong_weight=0.5))
    assert shaped.tolist() == [1.0, 0.5] and shaped.dtype == np.float32


def test_cut_off_completions_may_count_in_the_baseline_only():
    rewards, truncated = np.array([0.0, 1.0, 2.0]), np.array([True, False, False])
    settings = AdvantageSettings(scale="none", truncated="zero")
    assert rollout_advantages(rewards, truncated, settings).tolist() == [0, 0, 1]
    assert rollout_advantages(rewards, truncated, AdvantageSettings(scale="none")).tolist() == [-1, 0, 1]


def test_rewards_of_turns_are_normalised_over_the_group_and_summed_to_the_end():
    first, second = process_advantages([np.array([1.0, 0.0]), np.array([0.0, 0.0, 1.0])])
    std = np.std([1, 0, 0, 0, 1], ddof=1) + STD_EPSILON
    high, low = 0.6 / std, -0.4 / std
    np.testing.assert_allclose(first, [high + low, low], rtol=1e-5)
    np.testing.assert_allclose(second, [2 * low + high, low + high, high], rtol=1e-5)


def test_turns_of_equal_rewards_teach_nothing():
    assert [each.tolist() for each in process_advantages([np.array([0.1, 0.1]), np.array([0.1])])] == [[0, 0], [0]]


def test_one_turn_each_is_the_advantage_of_the_group():
    rewards = np.array([0.3, 0.9, 0.1])
    np.testing.assert_allclose(np.concatenate(process_advantages(rewards[:, None])), group_advantages(rewards))


def test_equal_rewards_get_exactly_zero_although_their_deviation_rounds_to_more():
    rewards = np.full(7, 0.1, dtype=np.float32)
    assert is_zero_variance(rewards)
    assert not group_advantages(rewards).any()


@given(groups)
def test_zero_variance_means_that_all_are_equal(rewards):
    assert is_zero_variance(rewards) == (len(set(rewards.tolist())) == 1)


def test_an_empty_group_has_no_variance():
    assert is_zero_variance(np.array([]))


def test_an_unknown_scale_is_refused():
    with pytest.raises(ConfigError, match="advantage.scale=batch_std is not one of group_std, none"):
        group_advantages(np.array([0.0, 1.0]), "batch_std")
    with pytest.raises(ConfigError, match="advantage.baseline=mean is not one of group_mean, leave_one_out, none"):
        group_advantages(np.array([0.0, 1.0]), baseline="mean")


@given(st.lists(groups, max_size=8), st.data())
def test_groups_are_judged_together_as_they_are_alone(rewards, data):
    words = {
        "scale": data.draw(scales),
        "baseline": data.draw(st.sampled_from(["group_mean", "leave_one_out", "none"])),
    }
    settings = AdvantageSettings(
        **words,
        unbiased=data.draw(st.booleans()),
        truncated=data.draw(st.sampled_from(["keep", "zero"])),
        overlong_tokens=data.draw(st.sampled_from([0, 4])),
    )
    lengths = [np.arange(len(each)) % 12 for each in rewards]
    truncated = [np.arange(len(each)) % 3 == 1 for each in rewards]
    found = judged(rewards, lengths, truncated, 12, settings)
    assert len(found) == len(rewards)
    for one, each, tokens, cut in zip(found, rewards, lengths, truncated, strict=True):
        shaped = shaped_rewards(each, tokens, 12, settings)
        assert one.advantages.dtype == np.float32
        assert one.advantages.tolist() == rollout_advantages(shaped, cut, settings).tolist()
        assert one.zero_variance == is_zero_variance(shaped)
