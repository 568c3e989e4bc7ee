import numpy as np
import pytest

from forge_async.apps.bench.packing import balance_row, imbalance, long_tailed, samples_of


def test_lengths_are_long_tailed_within_their_bounds():
    lengths = long_tailed(2000, 24, 256, seed=0)
    assert lengths.min() > 4 and lengths.max() == 256
    assert np.median(lengths) == pytest.approx(24, rel=0.1)
    assert lengths.mean() > 1.3 * np.median(lengths)
    samples = samples_of(lengths[:5], seed=0)
    assert samples.lengths.tolist() == lengths[:5].tolist()
    assert samples.num_loss_tokens == samples.num_tokens - 4 * 5


def test_imbalance_is_what_ranks_wait_for_each_other():
    assert imbalance([4096, 4096], 2) == 0
    assert imbalance([4096, 4096, 4096], 2) == pytest.approx(1 / 3), "two of three parts are waited for"


def test_many_long_samples_are_shared_evenly():
    for ranks in (2, 8):
        assert balance_row(ranks, seed=0, rounds=5)["imbalance_fraction"] < 0.03
