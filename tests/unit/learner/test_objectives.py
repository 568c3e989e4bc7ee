"""Each objective against numbers worked out by hand, and its gradient against the slope."""

import math
from dataclasses import replace

import pytest
import torch

from forge_async.core.errors import ConfigError, LearnerError
from forge_async.learner.figures import step_figures
from forge_async.learner.loss import objective_loss, supervised_loss
from forge_async.learner.objectives import BY_NAME, cross_entropy, objective
from forge_async.learner.objectives.distillation import distillation
from forge_async.learner.objectives.entropy import entropy_bonus
from forge_async.learner.objectives.kl import kl_estimate, kl_loss, with_kl_in_reward
from forge_async.learner.objectives.ppo import value_loss
from forge_async.learner.settings import OBJECTIVES, CorrectionSettings, ObjectiveSettings
from tests.unit.learner.micro import at, counts_of, one_row, random_inputs

CLIP = ObjectiveSettings(clip_low=0.2, clip_high=0.28)
SURROGATES = ("grpo", "dr_grpo", "dapo", "reinforce_pp", "ppo")


def loss_and_slope(name, ratio, advantage, settings=CLIP):
    """Loss of one token, d loss / d logprob, and whether it counts as clipped."""
    inputs = one_row([ratio], [advantage])
    found = BY_NAME[name](inputs, settings)
    found.loss.sum().backward()
    return float(found.loss.detach()), float(inputs.logprobs.grad), bool(found.clipped)


def test_every_name_has_its_function():
    assert set(BY_NAME) == set(OBJECTIVES)


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # above the range and already better: no more push
        (0.5, 2.0, -1.0, -1.0, True),  # below the range and better wanted: full push
        (1.5, -2.0, 3.0, 3.0, True),  # above the range and worse wanted: full push
        (0.5, -2.0, 1.6, 0.0, True),  # below the range and already worse: no more push
        (0.85, -2.0, 1.7, 1.7, False),
    ],
)
def test_the_clipped_surrogate_by_hand(name, ratio, advantage, loss, slope, clipped):
    found = loss_and_slope(name, ratio, advantage)
    assert found[:2] == (pytest.approx(loss, abs=1e-12), pytest.approx(slope, abs=1e-12))
    assert found[2] == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [(2.0, -1.0, 2.0, 2.0), (5.0, -1.0, 3.0, 0.0), (1e6, -2.0, 6.0, 0.0), (5.0, 1.0, -1.28, 0.0)],
)
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage(ratio, advantage, loss, slope):
    found = loss_and_slope("grpo", ratio, advantage, replace(CLIP, dual_clip=3.0))
    assert found[:2] == (pytest.approx(loss, abs=1e-9), pytest.approx(slope, abs=1e-9))


def test_gspo_clips_the_geometric_mean_of_a_samples_ratios():
    # Samples of ratios (4, 1) and (0.25, 1, 1): means 2 and 0.25^(1/3) = 0.63.
    inputs = one_row([4.0, 1.0, 0.25, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], segments=[0, 0, 1, 1, 1])
    found = BY_NAME["gspo"](inputs, CLIP)
    low = 0.25 ** (1 / 3)
    assert found.loss[0].tolist() == pytest.approx([-1.28, -1.28, -low, -low, -low])
    assert found.clipped.all()
    found.loss.sum().backward()
    # The first sample is clipped; each token of the second takes a third of the slope of three equal losses.
    assert inputs.logprobs.grad[0].tolist() == pytest.approx([0.0, 0.0, -low, -low, -low])


def test_gspo_leaves_out_what_lies_outside_the_mask():
    inputs = one_row([4.0, 9.0], [1.0, 0.0], mask=[1.0, 0.0])
    assert float(BY_NAME["gspo"](inputs, replace(CLIP, clip_high=10.0)).loss.detach()[0, 0]) == pytest.approx(-4.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.0, 2.0, 1.0, False), (9.0, 2.0, 5.0, True), (9.0, -2.0, 5.0, True), (0.01, -1.0, 0.01, False)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, advantage, weight, clipped):
    settings = ObjectiveSettings(clip_low=1.0, clip_high=4.0)
    loss, slope, was_clipped = loss_and_slope("cispo", ratio, advantage, settings)
    assert loss == pytest.approx(-weight * advantage * math.log(0.5 * ratio))
    assert slope == pytest.approx(-weight * advantage)
    assert was_clipped == clipped


@pytest.mark.parametrize(("ratio", "advantage"), [(1.0, 2.0), (7.0, -2.0), (0.1, 3.0)])
def test_rloo_weighs_by_the_ratio_and_clips_nothing(ratio, advantage):
    inputs = one_row([ratio], [advantage])
    found = BY_NAME["rloo"](inputs, CLIP)
    found.loss.sum().backward()
    assert found.clipped is None
    assert float(found.loss.detach()) == pytest.approx(-ratio * advantage)
    assert float(inputs.logprobs.grad) == pytest.approx(-ratio * advantage)


def test_cross_entropy_is_minus_the_log_probability():
    inputs = one_row([1.0, 0.5], [0.0, 0.0])
    assert cross_entropy(inputs, CLIP).loss[0].tolist() == pytest.approx([math.log(2), math.log(4)])


@pytest.mark.parametrize("name", [*SURROGATES, "gspo", "rloo"])
@pytest.mark.parametrize("dual_clip", [0.0, 2.0])
def test_the_gradient_is_the_slope(name, dual_clip):
    inputs, settings = random_inputs(), replace(CLIP, dual_clip=dual_clip)
    weights = torch.rand(inputs.mask.shape, dtype=torch.float64) * inputs.mask
    loss = lambda x: (BY_NAME[name](at(inputs, x), settings).loss * weights).sum()  # noqa: E731
    assert torch.autograd.gradcheck(loss, (inputs.logprobs,), eps=1e-6, atol=1e-7)


# Divergence, entropy, teacher.


def test_the_three_estimates_of_the_divergence_by_hand():
    mine, reference = torch.tensor([[math.log(0.5)]]), torch.tensor([[math.log(0.25)]])
    assert float(kl_estimate(mine, reference, "k1")) == pytest.approx(math.log(2))
    assert float(kl_estimate(mine, reference, "k2")) == pytest.approx(math.log(2) ** 2 / 2)
    assert float(kl_estimate(mine, reference, "k3")) == pytest.approx(0.5 - 1 + math.log(2))


def test_k3_of_a_small_difference_is_not_lost_to_rounding():
    difference = torch.tensor([[1e-4, -1e-4]])
    found = kl_estimate(difference, torch.zeros(1, 2), "k3")
    assert found[0].tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2)


def test_the_estimates_are_right_on_average():
    torch.manual_seed(0)
    mine, other = torch.randn(7, dtype=torch.float64).softmax(0), torch.randn(7, dtype=torch.float64).softmax(0)
    divergence = float((mine * (mine / other).log()).sum())
    for kind in ("k1", "k3"):
        assert float((mine * kl_estimate(mine.log(), other.log(), kind)).sum()) == pytest.approx(divergence, rel=1e-12)


def test_the_gradient_of_k2_and_of_weighted_k3_is_that_of_the_divergence_and_that_of_plain_k3_is_not():
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64).requires_grad_()
    reference = torch.randn(5, dtype=torch.float64).log_softmax(0)
    mine = logits.log_softmax(0)
    sampled = mine.detach().exp()
    exact = torch.autograd.grad((mine.exp() * (mine - reference)).sum(), logits, retain_graph=True)[0]

    def slope(kind):
        estimate = kl_estimate(mine, reference, kind.removesuffix("_is"))
        estimate = estimate * (mine - mine.detach()).exp() if kind.endswith("_is") else estimate
        return torch.autograd.grad((sampled * estimate).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(slope("k2"), exact)
    torch.testing.assert_close(slope("k3_is"), exact)
    assert float(slope("k1").abs().max()) < 1e-12
    assert float((slope("k3") - exact).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_is"])
def test_the_gradient_of_the_divergence_is_the_slope(kind):
    inputs, settings = random_inputs(), ObjectiveSettings(kl_kind=kind)
    loss = lambda x: (kl_loss(at(inputs, x), settings).loss * inputs.mask).sum()  # noqa: E731
    assert torch.autograd.gradcheck(loss, (inputs.logprobs,), eps=1e-6, atol=1e-7)


def test_the_weighted_divergence_is_the_ratio_times_k3():
    inputs = one_row([2.0], [0.0], reference_logprobs=[math.log(0.5)])
    assert float(kl_loss(inputs, ObjectiveSettings(kl_kind="k3_is")).loss.detach()) == pytest.approx(
        2.0 * (0.5 - 1 + math.log(2))
    )


def test_in_the_reward_a_token_pays_for_itself_and_for_what_follows_in_its_sample():
    inputs = one_row(
        [1.0] * 5, [1.0, 1.0, 0.0, 1.0, 1.0], mask=[1, 1, 0, 1, 1], segments=[0, 0, 0, 1, 1],
        reference_logprobs=[math.log(0.5) - each for each in (0.1, 0.2, 9.0, 0.4, 0.8)],
    )  # fmt: skip
    settings = ObjectiveSettings(kl_weight=0.5, kl_kind="k1", kl_place="reward")
    found = with_kl_in_reward(inputs, settings).advantages
    assert found[0].tolist() == pytest.approx([1 - 0.15, 1 - 0.1, 0.0, 1 - 0.6, 1 - 0.4])
    assert not found.requires_grad


def test_the_entropy_bonus_is_minus_the_entropy():
    inputs = one_row([1.0, 1.0], [0.0, 0.0], entropy=[0.3, 0.7])
    assert entropy_bonus(inputs, CLIP).loss[0].tolist() == pytest.approx([-0.3, -0.7])


def test_distillation_pushes_by_the_log_ratio_to_the_teacher():
    inputs = one_row([1.0, 2.0], [0.0, 0.0], teacher_logprobs=[math.log(0.25), math.log(1.0)])
    found = distillation(inputs, CLIP)
    found.loss.sum().backward()
    # Token 1: the teacher gives half of what the policy gives; token 2: as much, with ratio 2 and probability 1.
    assert found.loss[0].tolist() == pytest.approx([math.log(2), 0.0])
    assert inputs.logprobs.grad[0].tolist() == pytest.approx([math.log(2), 0.0])


def test_distillations_expected_gradient_is_that_of_the_reverse_divergence():
    torch.manual_seed(1)
    logits = torch.randn(6, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, dtype=torch.float64).log_softmax(0)
    mine = logits.log_softmax(0)
    exact = torch.autograd.grad((mine.exp() * (mine - teacher)).sum(), logits, retain_graph=True)[0]
    behaviour = torch.randn(6, dtype=torch.float64).log_softmax(0)
    inputs = replace(
        one_row([1.0] * 6, [0.0] * 6),
        logprobs=mine[None], anchor_logprobs=behaviour[None], behaviour_logprobs=behaviour[None],
        teacher_logprobs=teacher[None],
    )  # fmt: skip
    expected = (behaviour.exp() * distillation(inputs, CLIP).loss[0]).sum()
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], exact)


@pytest.mark.parametrize(
    ("function", "what"),
    [(kl_loss, "reference"), (entropy_bonus, "entropies"), (distillation, "teacher"), (value_loss, "returns")],
)
def test_a_term_without_its_input_says_so(function, what):
    with pytest.raises(LearnerError, match=what):
        function(one_row([1.0], [1.0]), CLIP)


@pytest.mark.parametrize(
    ("value", "old", "clip", "loss", "slope"),
    [
        (1.0, 1.0, 0.2, 0.5, -1.0),
        (1.5, 1.0, 0.2, 0.32, 0.0),  # moved far towards the return of 2: counts as if at 1.2
        (1.5, 1.0, 0.0, 0.125, -0.5),  # without a clip
        (0.5, 1.0, 0.2, 1.125, -1.5),  # moved far away from it: counts whole
        (2.5, 3.0, 0.2, 0.32, 0.0),
    ],
)
def test_the_value_loss_by_hand(value, old, clip, loss, slope):
    inputs = one_row([1.0], [0.0], old_values=[old], returns=[2.0])
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    found = value_loss(replace(inputs, values=values), ObjectiveSettings(value_clip=clip)).loss
    found.sum().backward()
    assert float(found.detach()) == pytest.approx(loss)
    assert float(values.grad) == pytest.approx(slope)


def test_ppo_adds_the_error_of_its_values():
    inputs = one_row([1.0, 1.0], [1.0, 1.0], values=[0.0, 0.0], old_values=[0.0, 0.0], returns=[1.0, 3.0])
    settings = ObjectiveSettings(name="ppo", value_weight=0.5)
    counts = counts_of(inputs)
    terms = objective_loss(settings, "token_is")(inputs, counts)
    assert float(terms.loss.detach()) == pytest.approx(-1 + 0.5 * (0.5 + 4.5) / 2)
    sums, maxima = ({k: float(v) for k, v in each.items()} for each in (terms.sums, terms.maxima))
    figures = step_figures(sums, maxima, counts)
    assert figures["value/explained_fraction"] == pytest.approx(1 - 10 / 2)


# Denominators and components.


def two_samples():
    """A sample of one token and one of three, all of ratio 1 and advantage 1."""
    return one_row([1.0] * 4, [1.0] * 4, segments=[0, 1, 1, 1])


@pytest.mark.parametrize(
    ("denominator", "slopes"),
    [
        ("tokens", [1 / 4] * 4),
        ("sequence_means", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("sequences", [1 / 2] * 4),
        ("constant", [1 / 30] * 4),  # three samples of the batch, one left out, times ten tokens
    ],
)
def test_denominators_by_hand(denominator, slopes):
    inputs = two_samples()
    loss = objective_loss(ObjectiveSettings(denominator=denominator, constant_tokens=10), "token_is")
    terms = loss(inputs, counts_of(inputs, num_batch_samples=3))
    terms.loss.backward()
    assert (-inputs.logprobs.grad[0]).tolist() == pytest.approx(slopes)
    assert float(terms.loss.detach()) == pytest.approx(-sum(slopes))


def test_a_constant_length_must_be_given():
    with pytest.raises(ConfigError, match="constant_tokens"):
        objective_loss(ObjectiveSettings(denominator="constant"), "none")


def test_components_add_up_with_their_weights():
    inputs = random_inputs()
    settings = ObjectiveSettings(weight=0.5, kl_weight=0.1, entropy_weight=0.01, teacher="there", teacher_weight=2.0)
    counts = counts_of(inputs)
    terms = objective_loss(settings, "token_is")(inputs, counts)
    alone = float(objective_loss(ObjectiveSettings(), "token_is")(inputs, counts).loss.detach())
    mean = lambda found: float((found.loss * inputs.mask).sum().detach()) / counts.num_loss_tokens  # noqa: E731
    parts = {
        "loss/objective": 0.5 * alone,
        "loss/kl": 0.1 * mean(kl_loss(inputs, settings)),
        "loss/entropy": 0.01 * mean(entropy_bonus(inputs, settings)),
        "loss/teacher": 2.0 * mean(distillation(inputs, settings)),
    }
    assert {name: float(terms.sums[name]) for name in parts} == pytest.approx(parts)
    assert float(terms.loss.detach()) == pytest.approx(sum(parts.values()))


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_batch():
    seen = []
    loss = objective_loss(ObjectiveSettings(normalise_advantages=True), "token_is")
    spy = lambda inputs, settings: seen.append(inputs) or BY_NAME["grpo"](inputs, settings)  # noqa: E731
    loss = replace(loss, components=[replace(loss.components[0], function=spy)])
    inputs = random_inputs()
    loss(inputs, counts_of(inputs))
    trained = seen[0].advantages[inputs.mask > 0]
    assert float(trained.mean()) == pytest.approx(0, abs=1e-9)
    assert float(trained.std(correction=0)) == pytest.approx(1, rel=1e-6)
    assert not seen[0].advantages[inputs.mask == 0].any()


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "ppo"])  # its advantages come from values
@pytest.mark.parametrize("advantage", [0.0, 0.5])
def test_equal_advantages_are_no_number_trouble(name, advantage):
    inputs = one_row([1.0, 1.2], [advantage] * 2)
    settings = ObjectiveSettings(name=name, normalise_advantages=True)
    terms = objective_loss(settings, "token_is")(inputs, counts_of(inputs))
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0
    assert inputs.logprobs.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_micro_batch_without_a_token_adds_exactly_nothing(name):
    full = random_inputs()
    empty = replace(full, mask=torch.zeros_like(full.mask), advantages=torch.zeros_like(full.mask))
    settings = ObjectiveSettings(name=name, kl_weight=0.1, entropy_weight=0.1, teacher="there", constant_tokens=5)
    for correction in ("token_is", "sequence_truncated", "geometric_mask", "vtrace"):
        terms = objective_loss(settings, correction)(empty, counts_of(full))
        terms.loss.backward()
        assert float(terms.loss.detach()) == 0
        assert not empty.logprobs.grad.any()
        assert all(float(value) == 0 for value in terms.sums.values())


def test_tokens_outside_the_mask_count_nowhere():
    inputs = one_row([1.0, 1e20], [1.0, 0.0], mask=[1.0, 0.0])
    terms = objective_loss(ObjectiveSettings(), "token_is")(inputs, counts_of(inputs))
    terms.loss.backward()
    assert float(terms.loss.detach()) == -1.0
    assert float(terms.sums["mismatch_kl"]) == float(terms.maxima["logprob_diff"]) == 0
    assert inputs.logprobs.grad.tolist() == [[-1.0, 0.0]]


def test_demonstrations_are_not_compared_with_a_sampler():
    inputs = one_row([1.0, 0.5, 1.0], [0.0] * 3, mask=[1.0, 1.0, 0.0])
    terms = supervised_loss()(inputs, counts_of(inputs))
    assert float(terms.loss.detach()) == pytest.approx((math.log(2) + math.log(4)) / 2)
    assert set(terms.sums) == {"clipped", "mismatch_kl", "loss/objective"}
    assert all(float(terms.sums[name]) == 0 for name in ("clipped", "mismatch_kl"))


def test_the_settings_choose_objective_and_correction():
    inputs = one_row([2.0], [1.0])
    counts = counts_of(inputs)
    settings = ObjectiveSettings(clip_low=0.1, clip_high=0.5)
    value = lambda name, correction: float(  # noqa: E731
        objective_loss(replace(settings, name=name), correction, CorrectionSettings(high=1.7))(
            inputs, counts
        ).loss.detach()
    )
    assert value("grpo", "token_is") == pytest.approx(-1.5)
    assert value("rloo", "token_is") == pytest.approx(-2.0)
    assert value("grpo", "none") == pytest.approx(-1.0)
    assert value("grpo", "token_truncated") == pytest.approx(-1.7)


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match=r"objective.name=grpo2 is not one of grpo"):
        objective("grpo2")
    with pytest.raises(ConfigError, match=r"async.correction=tis is not one of token_is"):
        objective_loss(ObjectiveSettings(), "tis")
