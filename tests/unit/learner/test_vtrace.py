"""V-trace with values: by hand, against the sum of its definition, and over packed rows."""

import numpy as np
import pytest

from forge_async.learner.loss import objective_loss
from forge_async.learner.settings import CorrectionSettings, ObjectiveSettings
from forge_async.learner.vtrace import vtrace_targets
from tests.unit.learner.micro import one_row


def targets(values, rewards, ratios, mask=None, segments=None, gamma=0.9, rho_max=2.0):
    count = len(values)
    advantages, returns = vtrace_targets(
        np.array([values], np.float32),
        np.array([rewards], np.float32),
        np.log(np.array([ratios], np.float32)),
        np.array([mask or [1] * count], np.float32),
        np.array([segments or [0] * count]),
        gamma=gamma,
        rho_max=rho_max,
    )
    return advantages[0].tolist(), returns[0].tolist()


def test_one_turn_is_compared_with_the_value_before_it():
    # Ratio 2 * 0.75 = 1.5, reward 1, value 0.2 before the first token: 0.2 + 1.5 * 0.8 = 1.4.
    advantages, returns = targets([0.2, 0.9], [0.0, 1.0], [2.0, 0.75])
    assert advantages == pytest.approx([1.2, 1.2])
    assert returns == pytest.approx([1.4, 1.4])
    # Truncated at 1: 0.2 + 0.8 = 1.
    advantages, returns = targets([0.2, 0.9], [0.0, 1.0], [2.0, 0.75], rho_max=1.0)
    assert advantages == pytest.approx([0.8, 0.8]) and returns == pytest.approx([1.0, 1.0])


def test_two_turns_by_hand():
    # Turn 2: ratio 4, rho 2, c 1: v = 0.5 + 2 (1 - 0.5) = 1.5, A = 1.
    # Turn 1: ratio 0.5, reward 0.2: v = 0.4 + 0.5 (0.2 + 0.9 * 0.5 - 0.4) + 0.9 * 0.5 (1.5 - 0.5) = 0.975,
    # A = 0.5 (0.2 + 0.9 * 1.5 - 0.4) = 0.575. The answer between them earns and says nothing.
    advantages, returns = targets([0.4, 9.0, 9.0, 0.5], [0.0, 0.2, 0.0, 1.0], [0.5, 1.0, 7.0, 4.0], mask=[1, 1, 0, 1])
    assert advantages == pytest.approx([0.575, 0.575, 0.0, 1.0])
    assert returns == pytest.approx([0.975, 0.975, 0.0, 1.5])


def test_it_is_the_sum_of_impalas_definition():
    """v_s = V_s + sum over t >= s of gamma^(t-s) (c_s ... c_(t-1)) rho_t (r_t + gamma V_(t+1) - V_t)."""
    rng = np.random.default_rng(0)
    values, rewards, ratios = rng.normal(size=5), rng.normal(size=5), np.exp(rng.normal(0, 0.7, size=5))
    rho, c, following = np.minimum(ratios, 2.0), np.minimum(ratios, 1.0), np.append(values[1:], 0.0)
    expected = [
        values[s]
        + sum(
            0.9 ** (t - s) * np.prod(c[s:t]) * rho[t] * (rewards[t] + 0.9 * following[t] - values[t])
            for t in range(s, 5)
        )
        for s in range(5)
    ]
    spread = [x for each in zip(values, rewards, ratios, strict=True) for x in (each, (7.0, 0.0, 7.0))]
    columns = [[each[i] for each in spread] for i in range(3)]
    advantages, returns = targets(*columns, mask=[1, 0] * 5)
    assert returns[::2] == pytest.approx(expected, rel=1e-5)
    after = [*expected[1:], 0.0]
    assert advantages[::2] == pytest.approx(list(rho * (rewards + 0.9 * np.array(after) - values)), rel=1e-4)


def test_on_policy_it_is_the_return_less_the_value():
    advantages, returns = targets([0.3, 0.1, 0.7], [1.0, 2.0, 4.0], [1.0] * 3, mask=[1, 1, 1], gamma=1.0, rho_max=1.0)
    assert returns == pytest.approx([7.0] * 3) and advantages == pytest.approx([6.7] * 3)


def test_samples_of_a_row_do_not_see_each_other_and_padding_gets_nothing():
    alone = targets([0.4, 0.5], [1.0, 0.0], [0.5, 0.5])
    advantages, returns = targets(
        [0.4, 0.5, 0.1, 8.0], [1.0, 0.0, 5.0, 5.0], [0.5, 0.5, 1.0, 1.0], mask=[1, 1, 1, 0], segments=[0, 0, 1, 2]
    )
    assert (advantages[:2], returns[:2]) == (pytest.approx(alone[0]), pytest.approx(alone[1]))
    assert (advantages[3], returns[3]) == (0.0, 0.0)
    assert targets([1.0, 2.0], [1.0, 2.0], [1.0, 1.0], mask=[0, 0]) == ([0.0, 0.0], [0.0, 0.0])


def test_without_values_it_is_what_the_correction_makes_of_the_reward():
    ratios, mask = [1.3, 0.6, 1.0, 2.5, 0.9], [1, 1, 0, 1, 1]
    advantages, _ = targets([0.0] * 5, [0.0, 0.0, 0.0, 0.0, 1.7], ratios, mask=mask, gamma=1.0, rho_max=1.5)
    inputs = one_row(ratios, [1.7] * 5, mask=mask)
    weights = objective_loss(ObjectiveSettings(), "vtrace", CorrectionSettings(high=1.5)).correct(inputs).weights
    assert advantages == pytest.approx((1.7 * weights * inputs.mask)[0].tolist())


def test_with_a_value_head_the_ratio_is_in_the_advantages_and_weighs_nothing_more():
    loss = objective_loss(ObjectiveSettings(name="ppo"), "vtrace", CorrectionSettings(high=1.5))
    assert loss.vtrace_rho_max == 1.5
    found = loss.correct(one_row([2.0], [1.0]))
    assert found.weights is None and float(found.logprobs.detach() - found.anchor_logprobs) == 0
    assert objective_loss(ObjectiveSettings(name="ppo"), "token_is").vtrace_rho_max is None
    assert objective_loss(ObjectiveSettings(), "vtrace").vtrace_rho_max is None
