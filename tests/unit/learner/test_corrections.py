"""Each correction against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from forge_async.learner.corrections import BY_NAME, correction
from forge_async.learner.figures import effective_fraction, step_figures
from forge_async.learner.loss import objective_loss
from forge_async.learner.settings import CorrectionSettings, ObjectiveSettings
from forge_async.replay.settings import CORRECTIONS
from tests.unit.learner.micro import counts_of, one_row, random_inputs

PLAIN = CorrectionSettings(high=2.0, low=0.5)


def weights(name, inputs, settings=PLAIN):
    found = correction(name, settings)(inputs)
    assert found.weights is not None and not found.weights.requires_grad
    assert not found.anchor_logprobs.requires_grad
    return found.weights[0].tolist()


def test_the_words_of_the_dial_are_the_corrections():
    assert tuple(BY_NAME) == CORRECTIONS


def test_token_is_anchors_at_the_sampler_and_none_at_the_current_policy():
    inputs = one_row([2.0, 0.5], [1.0, 1.0])
    anchored = correction("token_is", PLAIN)(inputs)
    assert anchored.weights is None and anchored.anchor_logprobs is inputs.behaviour_logprobs
    uncorrected = correction("none", PLAIN)(inputs)
    assert uncorrected.weights is None and (uncorrected.anchor_logprobs == inputs.logprobs).all()


RATIOS = [0.4, 0.9, 1.5, 3.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_truncated", [0.4, 0.9, 1.5, 2.0]),
        ("token_masked", [0.4, 0.9, 1.5, 0.0]),
        ("icepop", [0.0, 0.9, 1.5, 0.0]),
        ("aipo", [0.4, 0.9, 1.5, 2.0]),
        ("decoupled", [0.4, 0.9, 1.5, 2.0]),
    ],
)
def test_weights_of_tokens_by_hand(name, expected):
    inputs = one_row(RATIOS, [1.0] * 4)
    assert weights(name, inputs) == pytest.approx(expected)
    found = correction(name, PLAIN)(inputs)
    assert (found.anchor_logprobs == inputs.logprobs.detach()).all()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Samples: (0.5, 1.2) of product 0.6; (2, 3) of product 6, mean 2.45; (1, 1, one outside the mask).
        ("sequence_truncated", [0.6, 0.6, 2.0, 2.0, 1.0, 1.0, 1.0]),
        ("sequence_masked", [0.6, 0.6, 0.0, 0.0, 1.0, 1.0, 1.0]),
        ("geometric_mask", [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0]),
    ],
)
def test_weights_of_samples_by_hand(name, expected):
    inputs = one_row(
        [0.5, 1.2, 2.0, 3.0, 1.0, 1.0, 50.0], [1.0] * 7, mask=[1] * 6 + [0], segments=[0, 0, 1, 1, 2, 2, 2]
    )
    assert weights(name, inputs) == pytest.approx(expected)


def test_the_geometric_mask_does_not_grow_with_the_length():
    short, long = one_row([1.005] * 4, [1.0] * 4), one_row([1.005] * 400, [1.0] * 400)
    narrow = CorrectionSettings(low=0.99, high=1.01)
    assert set(weights("geometric_mask", short, narrow)) == set(weights("geometric_mask", long, narrow)) == {1.0}
    assert set(weights("sequence_masked", long, narrow)) == {0.0}


def test_off_policy_masking_leaves_out_bad_samples_that_have_become_unlikely():
    # Mean log(mu/pi): log 2 for samples 0 and 1, -log 2 for sample 2.
    inputs = one_row([0.5, 0.5, 0.5, 2.0], [-1.0, -1.0, 1.0, -1.0], segments=[0, 0, 1, 2])
    found = correction("off_policy_mask", CorrectionSettings(threshold=0.5))(inputs)
    assert found.weights[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert found.anchor_logprobs is inputs.behaviour_logprobs
    assert weights("off_policy_mask", inputs, CorrectionSettings(threshold=0.7)) == [1.0] * 4


def test_the_sign_that_off_policy_masking_looks_at_is_that_after_normalisation():
    # Rewards 1 and 2 become -1 and 1: only the sample that is worse than the other is left out.
    inputs = one_row([0.5, 0.5], [1.0, 2.0], segments=[0, 1])
    settings = ObjectiveSettings(normalise_advantages=True)
    terms = objective_loss(settings, "off_policy_mask")(inputs, counts_of(inputs))
    assert float(terms.sums["masked"]) == 1
    plain = objective_loss(ObjectiveSettings(), "off_policy_mask")(inputs, counts_of(inputs))
    assert float(plain.sums["masked"]) == 0


@pytest.mark.parametrize("name", ["none", "token_truncated", "icepop", "sequence_truncated", "vtrace", "decoupled"])
def test_in_later_updates_the_ratio_is_taken_from_the_steps_start(name):
    start = torch.full((1, 1), math.log(0.6), dtype=torch.float64)
    inputs = replace(one_row([1.5], [1.0]), start_logprobs=start)
    found = correction(name, PLAIN)(inputs)
    assert (found.anchor_logprobs == start).all()
    assert found.weights is None or float(found.weights) == pytest.approx(1.2)


def test_in_later_updates_aipo_weighs_by_the_current_policy():
    inputs = replace(one_row([1.5], [1.0]), start_logprobs=torch.full((1, 1), math.log(0.6), dtype=torch.float64))
    assert weights("aipo", inputs) == pytest.approx([1.5])


@pytest.mark.parametrize(("age", "way"), [(0, 0.0), (1, 0.5), (3, 0.75)])
def test_the_approximated_proximal_policy_lies_between_sampler_and_current(age, way):
    inputs = one_row([4.0], [1.0], ages=[age])
    found = correction("decoupled_approx", CorrectionSettings(high=10.0))(inputs)
    assert float(found.anchor_logprobs) == pytest.approx(math.log(0.5) + way * math.log(4))
    assert float(found.weights) == pytest.approx(4.0**way)
    capped = correction("decoupled_approx", CorrectionSettings(high=1.5))(inputs)
    assert float(capped.weights) == pytest.approx(min(4.0**way, 1.5))


def test_vtrace_multiplies_the_truncated_ratios_of_later_turns():
    # A sample of turns (2, 1.5) = 3, (0.5) and (0.8), and one of a single turn (4). high 2: rho 2, 0.5, 0.8 and 2; c 1,
    # 0.5. Weights: 2 * 0.5 * 0.8, then 0.5 * 0.8, then 0.8.
    inputs = one_row([2.0, 1.5, 9.0, 0.5, 9.0, 0.8, 4.0], [1.0] * 7, mask=[1, 1, 0, 1, 0, 1, 1], segments=[0] * 6 + [1])
    found = weights("vtrace", inputs)
    assert [found[i] for i in (0, 1, 3, 5, 6)] == pytest.approx([0.8, 0.8, 0.4, 0.8, 2.0])


def test_vtrace_is_the_value_recursion_of_impala():
    """The weight of turn k times the advantage is rho_k * v_(k+1), v by the recursion of remark 1 with values of 0."""
    ratios, reward, high = [1.3, 0.6, 2.5, 0.9], 1.7, 2.0
    rho, c = [min(r, high) for r in ratios], [min(r, 1.0) for r in ratios]
    values = [0.0] * 5  # v_k = rho_k * reward_k + c_k * v_(k+1), as gamma = 1 and V = 0
    for k in reversed(range(4)):
        values[k] = rho[k] * (reward if k == 3 else 0.0) + c[k] * values[k + 1]
    expected = [rho[k] * values[k + 1] for k in range(3)] + [rho[3] * reward]
    mask = [1, 0] * 4
    inputs = one_row([x for r in ratios for x in (r, 1.0)], [reward] * 8, mask=mask)
    assert [reward * w for w in weights("vtrace", inputs)[::2]] == pytest.approx(expected)


def test_for_one_turn_vtrace_is_the_truncated_ratio_of_the_sample():
    inputs = replace(random_inputs(), mask=torch.ones(3, 12, dtype=torch.float64))
    assert weights("vtrace", inputs) == pytest.approx(weights("sequence_truncated", inputs))


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_fall_with_age(name):
    inputs = one_row([1.0, 1.0, 1.0], [1.0] * 3, ages=[0, 1, 3], segments=[0, 1, 2])
    found = correction(name, replace(PLAIN, age_decay=0.5))(inputs)
    assert found.weights[0].tolist() == pytest.approx([1.0, 0.5, 0.125])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_with_unchanged_weights_every_correction_leaves_the_gradient_alone(name):
    inputs = one_row([1.0] * 4, [2.0, 2.0, -1.0, -1.0], segments=[0, 0, 1, 1])
    objective_loss(ObjectiveSettings(), name)(inputs, counts_of(inputs)).loss.backward()
    assert inputs.logprobs.grad[0].tolist() == pytest.approx([-0.5, -0.5, 0.25, 0.25])


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name not in ("token_is", "none")])
def test_the_loss_stays_bounded_for_huge_ratios_and_negative_advantages(name):
    """What sampled a token as nearly impossible must not blow up the step."""
    inputs = one_row([1e30, 1e30], [-1.0, -1.0], behaviour=1e-30)
    settings = ObjectiveSettings(dual_clip=3.0)
    loss = objective_loss(settings, name, PLAIN)(inputs, counts_of(inputs)).loss
    assert 0 <= float(loss.detach()) <= 6.0


@pytest.mark.parametrize("name", CORRECTIONS)
def test_neither_weight_nor_anchor_has_a_gradient(name):
    inputs = random_inputs()
    loss = objective_loss(ObjectiveSettings(name="rloo"), name)
    loss(inputs, counts_of(inputs)).loss.backward()
    fixed = loss.correct(random_inputs())
    ratio = (fixed.logprobs.detach() - fixed.anchor_logprobs).exp()
    expected = -ratio * fixed.advantages * (1 if fixed.weights is None else fixed.weights) * fixed.mask
    torch.testing.assert_close(inputs.logprobs.grad, expected / counts_of(inputs).num_loss_tokens)


# Figures.


def test_figures_by_hand():
    inputs = one_row([0.4, 1.0, 3.0, 7.0], [1.0, 1.0, -1.0, 1.0], mask=[1, 1, 1, 0])
    counts = counts_of(inputs)
    terms = objective_loss(ObjectiveSettings(), "icepop", PLAIN)(inputs, counts)
    sums = {name: float(value) for name, value in terms.sums.items()}
    figures = step_figures(sums, {name: float(value) for name, value in terms.maxima.items()}, counts)
    # Weights 0, 1, 0.
    assert figures == pytest.approx(
        {
            "ratio/masked_fraction": 2 / 3,
            "ratio/mean": 1 / 3,
            "ratio/max": 1.0,
            "ratio/effective_fraction": 1 / 3,
            "advantage/zero_fraction": 0.0,
            "mismatch/fresh_kl": sums["mismatch_kl"] / 3,
            "mismatch/fresh_logprob_diff_max": math.log(3),
        }
    )
    assert sums["mismatch_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (0.4, 1.0, 3.0)))
    assert float(terms.maxima["logprob_diff"]) == pytest.approx(math.log(3))


@pytest.mark.parametrize(
    ("values", "fraction"), [([1, 1, 1, 1], 1.0), ([5, 0, 0, 0], 0.25), ([2, 2, 0, 0], 0.5), ([0, 0], 0.0)]
)
def test_the_effective_sample_size(values, fraction):
    found = effective_fraction(sum(values), sum(v * v for v in values), len(values))
    assert found == pytest.approx(fraction)


def test_what_is_measured_of_entropy_and_divergences():
    inputs = one_row(
        [1.0, 1.0], [1.0, 1.0], entropy=[0.2, 0.4], reference_logprobs=[math.log(0.25), math.log(0.5)],
        teacher_logprobs=[math.log(0.5)] * 2,
    )  # fmt: skip
    counts = counts_of(inputs)
    terms = objective_loss(ObjectiveSettings(), "token_is")(inputs, counts)
    figures = step_figures(
        {name: float(value) for name, value in terms.sums.items()},
        {name: float(value) for name, value in terms.maxima.items()},
        counts,
    )
    assert figures["policy/entropy"] == pytest.approx(0.3)
    assert figures["reference/kl"] == pytest.approx((0.5 - 1 + math.log(2)) / 2)
    assert figures["teacher/kl"] == pytest.approx(0)
