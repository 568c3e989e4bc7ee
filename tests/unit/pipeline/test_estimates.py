import itertools
import math
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.pipeline.estimates import bootstrap, estimate, pass_at_k, wilson

COUNTS = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))


@pytest.mark.parametrize(
    ("num_samples", "num_solved", "k", "expected"),
    [(1, 0, 1, 0.0), (1, 1, 1, 1.0), (4, 1, 1, 1 / 4), (4, 2, 2, 5 / 6), (5, 3, 3, 1.0), (9, 1, 3, 1 / 3)],
)  # fmt: skip
def test_pass_at_k_by_hand(num_samples, num_solved, k, expected):
    assert pass_at_k(num_samples, num_solved, k) == pytest.approx(expected)


@given(COUNTS)
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(counts):
    n, c, k = counts
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(fmean(map(any, subsets)))


@given(COUNTS)
def test_pass_at_k_grows_with_k_and_with_what_was_solved(counts):
    n, c, k = counts
    if k < n:
        assert pass_at_k(n, c, k + 1) >= pass_at_k(n, c, k)
    if c < n:
        assert pass_at_k(n, c + 1, k) >= pass_at_k(n, c, k)
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


@pytest.mark.parametrize("counts", [(4, 2, 5), (4, 5, 2), (4, 2, 0)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*counts)


def test_wilson_by_hand():
    half = wilson(5, 10)
    assert (half.mean, half.low, half.high) == pytest.approx((0.5, 0.2366, 0.7634), abs=1e-4)
    none, all_of_them = wilson(0, 10), wilson(10, 10)
    assert (none.low, none.high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert (all_of_them.low, all_of_them.high) == pytest.approx((0.7225, 1.0), abs=1e-4)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_narrows_with_more_prompts(counts):
    solved, num = counts
    few, many = wilson(solved, num), wilson(4 * solved, 4 * num)
    assert 0 <= few.low <= few.mean <= few.high <= 1
    assert many.high - many.low < few.high - few.low


def test_a_bootstrap_is_as_wide_as_the_mean_is_uncertain():
    values = np.random.default_rng(1).uniform(size=400)
    found = bootstrap(values.tolist(), seed=3)
    assert found.mean == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(400), rel=0.1)
    assert bootstrap(values.tolist(), seed=3) == found, "the same values and seed, the same interval"
    assert bootstrap(values.tolist(), seed=4) != found


def test_zeros_and_ones_get_wilsons_interval_and_graded_scores_a_bootstrap():
    assert estimate([1.0, 0.0, 1.0], 0) == wilson(2, 3)
    assert estimate([1.0, 0.5, 1.0], 0) == bootstrap([1.0, 0.5, 1.0], 0)
    assert estimate([-2.0, 3.0], 0).mean == 0.5
