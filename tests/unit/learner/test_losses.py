import math

import pytest
import torch

from forge_async.learner.losses import cross_entropy_loss, grpo_loss, objective_loss
from forge_async.learner.settings import ObjectiveSettings

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def one_token(ratio, advantage, **kwargs):
    """The loss terms of one token that was sampled with probability 0.5, and d loss / d logprob."""
    behaviour = torch.tensor([[math.log(0.5)]], dtype=torch.float64)
    logprobs = (behaviour + math.log(ratio)).requires_grad_()
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    terms = grpo_loss(logprobs, behaviour, advantages, torch.ones(1, 1, dtype=torch.float64), **CLIP | kwargs)
    terms.loss_sum.backward()
    return terms, float(logprobs.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.56, 0.0, 1),  # above the range and already better: no more push
        (0.5, 2.0, -1.0, -1.0, 1),  # below the range and better wanted: full push
        (1.5, -2.0, 3.0, 3.0, 1),  # above the range and worse wanted: full push
        (0.5, -2.0, 1.6, 0.0, 1),  # below the range and already worse: no more push
        (0.85, -2.0, 1.7, 1.7, 0),
    ],
)
def test_grpo_by_hand(ratio, advantage, loss, gradient, clipped):
    terms, found = one_token(ratio, advantage)
    assert float(terms.loss_sum.detach()) == pytest.approx(loss, abs=1e-12)
    assert found == pytest.approx(gradient, abs=1e-12)
    assert int(terms.clipped_tokens) == clipped
    assert float(terms.logprob_diff_max) == pytest.approx(abs(math.log(ratio)), abs=1e-12)
    assert float(terms.kl_sum) == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-12)


def test_without_correction_the_ratio_has_no_say():
    terms, gradient = one_token(1.5, 2.0, corrected=False)
    assert float(terms.loss_sum.detach()) == pytest.approx(-2.0 * math.log(0.75))
    assert gradient == pytest.approx(-2.0)


def test_with_unchanged_weights_the_ratio_is_one():
    torch.manual_seed(0)
    logprobs = -torch.rand(3, 5)
    advantages, mask = torch.randn(3, 5), torch.ones(3, 5)
    terms = grpo_loss(logprobs.clone().requires_grad_(), logprobs, advantages, mask, **CLIP)
    assert float(terms.loss_sum.detach()) == pytest.approx(-float(advantages.sum()), rel=1e-6)
    assert float(terms.clipped_tokens) == float(terms.kl_sum) == float(terms.logprob_diff_max) == 0


def test_tokens_outside_the_mask_count_nowhere():
    logprobs = torch.tensor([[-1.0, -50.0]], requires_grad=True)
    behaviour, advantages = torch.tensor([[-1.0, 0.0]]), torch.tensor([[1.0, 9.0]])
    terms = grpo_loss(logprobs, behaviour, advantages, torch.tensor([[1.0, 0.0]]), **CLIP)
    terms.loss_sum.backward()
    assert float(terms.loss_sum.detach()) == -1.0
    assert float(terms.logprob_diff_max) == float(terms.kl_sum) == float(terms.clipped_tokens) == 0
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("corrected", [True, False])
def test_the_gradient_is_the_slope(corrected):
    torch.manual_seed(1)
    behaviour = -torch.rand(4, 6, dtype=torch.float64)
    logprobs = (behaviour + 0.6 * torch.randn(4, 6, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(4, 6, dtype=torch.float64)
    mask = (torch.rand(4, 6) < 0.7).double()
    loss = lambda x: grpo_loss(x, behaviour, advantages, mask, corrected=corrected, **CLIP).loss_sum  # noqa: E731
    assert torch.autograd.gradcheck(loss, (logprobs,), eps=1e-6, atol=1e-7)


def test_cross_entropy_is_the_sum_of_minus_logprobs_in_the_mask():
    logprobs = torch.tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    terms = cross_entropy_loss(logprobs, torch.zeros(1, 3), torch.zeros(1, 3), mask)
    terms.loss_sum.backward()
    assert float(terms.loss_sum.detach()) == 5.0
    assert logprobs.grad.tolist() == [[-1.0, 0.0, -1.0]]


def test_the_settings_choose_clip_range_and_correction():
    arguments = torch.tensor([[math.log(2.0)]]), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1)
    settings = ObjectiveSettings(clip_low=0.1, clip_high=0.5)
    assert float(objective_loss(settings, "token")(*arguments).loss_sum) == pytest.approx(-1.5)
    assert float(objective_loss(settings, "none")(*arguments).loss_sum) == pytest.approx(-math.log(2.0))
