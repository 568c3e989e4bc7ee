"""Advantages: centred, invariant to shifts, and 0 where a group teaches nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError
from forge_async.reward.advantages import STD_EPSILON, group_advantages, is_zero_variance

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
def test_a_group_of_one_gets_advantage_zero(scale):
    assert group_advantages(np.array([0.7]), scale).tolist() == [0.0]


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
