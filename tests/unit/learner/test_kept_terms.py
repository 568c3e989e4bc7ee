"""Log-probabilities over kept sets, against numbers worked out by masking the whole vocabulary."""

import numpy as np
import pytest
import torch

from forge_async.learner.kept_terms import kept_terms
from tests.strategies import make_samples, with_sets
from tests.unit.learner.micro import laid_out

VOCAB = 9
TARGETS = torch.tensor([[4, 7, 2, 0]])
KEPT = torch.tensor([[[4, 1, 8], [3, 7, -1], [2, -1, -1], [-1, -1, -1]]])


def logits_of(seed=0, dtype=torch.float32):
    return (3 * torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


def test_they_are_those_of_a_softmax_over_the_kept_tokens_alone():
    logits = logits_of()
    logprobs, entropy = kept_terms(logits, TARGETS, KEPT, 0.7)
    for at in range(3):
        kept = [id for id in KEPT[0, at].tolist() if id >= 0]
        odds = np.exp(logits[0, at, kept].double().numpy() / 0.7)
        shares = odds / odds.sum()
        assert float(logprobs[0, at]) == pytest.approx(np.log(shares[kept.index(int(TARGETS[0, at]))]), abs=1e-6)
        assert float(entropy[0, at]) == pytest.approx(-(shares * np.log(shares)).sum(), abs=1e-6)


def test_a_set_that_is_the_vocabulary_changes_nothing():
    logits, kept = logits_of(1), torch.arange(VOCAB).expand(1, 4, VOCAB)
    logprobs, entropy = kept_terms(logits, TARGETS, kept, 1.0)
    whole = logits.log_softmax(-1)
    assert torch.allclose(logprobs, whole.gather(-1, TARGETS[..., None])[..., 0], atol=1e-6)
    assert torch.allclose(entropy, -(whole.exp() * whole).sum(-1), atol=1e-6)


def test_a_token_without_a_set_is_certain_and_teaches_nothing():
    logits = logits_of().requires_grad_()
    logprobs, entropy = kept_terms(logits, TARGETS, KEPT, 1.0)
    assert (float(logprobs[0, 3].detach()), float(entropy[0, 3].detach())) == (0, 0)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logits.grad).all() and not logits.grad[0, 3].any()


def test_the_gradient_is_that_of_finite_differences_and_none_reaches_what_was_left_out():
    logits = logits_of(2).requires_grad_()
    logprobs, entropy = kept_terms(logits, TARGETS, KEPT, 0.7)
    (logprobs.sum() + 0.3 * entropy.sum()).backward()
    flat, step = logits.detach().reshape(-1), 1e-2

    def value(moved):
        found = kept_terms(moved.view(1, 4, VOCAB), TARGETS, KEPT, 0.7)
        return float(found[0].double().sum() + 0.3 * found[1].double().sum())

    for index in range(len(flat)):
        up, down = flat.clone(), flat.clone()
        up[index] += step
        down[index] -= step
        slope = (value(up) - value(down)) / (2 * step)
        assert float(logits.grad.reshape(-1)[index]) == pytest.approx(slope, abs=2e-3)
        place, id = divmod(index, VOCAB)
        if id not in KEPT[0, place]:
            assert float(logits.grad.reshape(-1)[index]) == 0


def test_half_precision_is_taken_to_full_before_anything_is_worked_out():
    logits = logits_of(3, torch.bfloat16)
    half, full = kept_terms(logits, TARGETS, KEPT, 0.7), kept_terms(logits.float(), TARGETS, KEPT, 0.7)
    assert half[0].dtype == torch.float32
    assert torch.equal(half[0], full[0]) and torch.equal(half[1], full[1])


def test_rows_carry_the_set_of_the_token_that_follows():
    samples = with_sets([[1, 1], [1]], width=2)
    (rows,) = laid_out(samples, row_tokens=6, micro_batch_tokens=100)
    assert rows.kept_set.shape == (1, 3, 2) and rows.kept_set.dtype == np.int64
    assert rows.kept_set[0].tolist() == [[10, 11], [20, 21], [40, 41]]
    assert (rows.kept_set[..., 0] >= 0).tolist() == (rows.mask > 0).tolist()


def test_rows_of_samples_without_sets_have_none():
    (rows,) = laid_out(make_samples([[1, 1]]), row_tokens=6, micro_batch_tokens=100)
    assert rows.kept_set is None
