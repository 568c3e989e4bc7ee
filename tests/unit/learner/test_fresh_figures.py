"""What is compared at the sampler's own version: samples that the trained version made whole."""

from __future__ import annotations

import math

import pytest

from forge_async.learner.figures import step_figures
from forge_async.learner.loss import objective_loss
from forge_async.learner.settings import ObjectiveSettings
from forge_async.learner.totals import merge_updates
from tests.unit.learner.micro import counts_of, one_row


def figures_of(ratios, ages, segments, mask=None):
    inputs = one_row(ratios, [1.0] * len(ratios), ages=ages, segments=segments, mask=mask)
    counts = counts_of(inputs)
    terms = objective_loss(ObjectiveSettings(), "token_is")(inputs, counts)
    sums = {name: float(value) for name, value in terms.sums.items()}
    return step_figures(sums, {name: float(value) for name, value in terms.maxima.items()}, counts)


def test_only_samples_without_an_old_token_count():
    found = figures_of([1.1, 0.9, 4.0, 3.0, 2.0], ages=[0, 0, 1, 0, 2], segments=[0, 0, 1, 1, 2])
    assert found["mismatch/fresh_logprob_diff_max"] == pytest.approx(-math.log(0.9))
    assert found["mismatch/fresh_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in (1.1, 0.9)) / 2)


def test_tokens_outside_the_mask_are_neither_fresh_nor_old():
    found = figures_of([1.1, 9.0], ages=[0, 0], segments=[0, 0], mask=[1.0, 0.0])
    assert found["mismatch/fresh_logprob_diff_max"] == pytest.approx(math.log(1.1))


def test_a_batch_of_old_samples_has_no_such_figure():
    found = figures_of([1.1, 0.9], ages=[1, 0], segments=[0, 0])
    assert not any(name.startswith("mismatch/") for name in found)


def test_of_several_updates_the_first_is_compared():
    first = {"mismatch_kl": 1.0, "fresh_kl": 0.5, "fresh_tokens": 4.0}, {"logprob_diff": 0.1, "fresh_logprob_diff": 0.1}
    later = {"mismatch_kl": 9.0, "fresh_kl": 0.0, "fresh_tokens": 0.0}, {"logprob_diff": 3.0, "fresh_logprob_diff": 0.0}
    assert merge_updates([first, later]) == first
