import pickle

import numpy as np
import pytest

from forge_async.core import kept_sets
from forge_async.core.errors import ForgeError, PolicyError
from forge_async.core.records import Samples
from forge_async.policy.ports import Sampling
from forge_async.policy.settings import SamplingSettings
from tests.strategies import with_sets

OUT = -np.inf


def test_what_the_sampler_left_out_is_not_in_the_set():
    ids = np.array([[5, 3, 9, 1], [2, 7, 4, 0]])
    logprobs = np.array([[-0.1, -2.4, OUT, OUT], [-0.5, -1.2, -2.3, OUT]])
    found = kept_sets.from_logprobs(ids, logprobs, is_whole=False)
    assert found.tolist() == [[5, 3, -1], [2, 7, 4]] and found.dtype == np.int32


def test_a_set_that_may_go_on_beyond_what_is_known_is_left_empty():
    ids, logprobs = np.array([[5, 3], [2, 7]]), np.array([[-0.1, -2.4], [0.0, OUT]])
    assert kept_sets.from_logprobs(ids, logprobs, is_whole=False).tolist() == [[-1], [2]]
    assert kept_sets.from_logprobs(ids, logprobs, is_whole=True).tolist() == [[5, 3], [2, -1]]
    assert kept_sets.is_known(np.array([[-1, -1], [2, -1]])).tolist() == [False, True]


def test_sets_of_unequal_width_are_laid_together():
    narrow, wide = np.array([[1]], np.int32), np.array([[2, 3], [4, -1]], np.int32)
    assert kept_sets.lay_together([narrow, None, wide], [1, 0, 2]).tolist() == [[1, -1], [2, 3], [4, -1]]
    assert kept_sets.lay_together([None, None], [1, 2]) is None
    with pytest.raises(ForgeError, match="with and without kept_set"):
        kept_sets.lay_together([narrow, None], [1, 2])


def test_samples_keep_their_sets_through_selection_concatenation_and_a_journey():
    samples, wider = with_sets([[1, 1], [2]], 2), with_sets([[3]], 3)
    whole = pickle.loads(pickle.dumps(Samples.concat([samples, wider]), protocol=5))
    assert whole.kept_set[:5, :2].tolist() == samples.kept_set.tolist() and (whole.kept_set[:5, 2] == -1).all()
    assert whole.kept_set[5:].tolist() == wider.kept_set.tolist()
    assert whole.select([1, 2]).kept_set.tolist() == whole.kept_set[3:].tolist()


def test_top_p_alone_is_bounded_by_the_setting():
    alone, both = SamplingSettings(top_p=0.9, max_kept_tokens=30), SamplingSettings(top_p=0.9, top_k=20)
    assert (alone.until(()).top_k, both.until(()).top_k, SamplingSettings().until(()).top_k) == (30, 20, 0)
    with pytest.raises(PolicyError, match="top_p=0.9 alone has no bound"):
        Sampling(max_new_tokens=4, top_p=0.9)


def test_only_a_sampler_that_leaves_tokens_out_has_sets():
    def leaves_out(**how):
        return Sampling(max_new_tokens=1, **how).leaves_out

    assert leaves_out(top_k=3) and leaves_out(top_p=0.5, top_k=9)
    assert not leaves_out(temperature=0.7) and not leaves_out(temperature=0.0, top_p=0.5)
