import dataclasses

import numpy as np

from forge_async.core.records import PromptId
from forge_async.learner.batch import split_batch
from tests.strategies import make_group


def group(index, advantages):
    """A group of one rollout a given advantage, rollout i of i + 1 sampled tokens."""
    made = make_group(
        index, PromptId(source="s", epoch=0, index=index), [[0] * (i + 1) for i in range(len(advantages))]
    )
    per_token = np.repeat(advantages, made.samples.lengths) * made.samples.loss_mask
    return dataclasses.replace(made, samples=dataclasses.replace(made.samples, advantages=per_token.astype(np.float32)))


def kept_tokens(shares):
    return sorted(t for share in shares if share.samples for t in share.samples.token_ids.tolist())


def test_all_shares_carry_the_denominator_of_the_whole_batch():
    groups = [group(4, [1.0, -1.0]), group(7, [0.5, 0.5, -1.0])]
    shares = split_batch(groups, 2, keep_zero_advantage=False)
    assert [share.num_loss_tokens for share in shares] == [9, 9]
    assert [share.group_indices for share in shares] == [(4, 7), (4, 7)]
    assert sum(share.samples.num_loss_tokens for share in shares) == 9
    assert kept_tokens(shares) == sorted(t for g in groups for t in g.samples.token_ids.tolist())


def test_all_shares_carry_the_counts_and_moments_of_the_whole_batch():
    groups = [group(4, [1.0, -1.0]), group(7, [0.0, 0.5, -1.0])]
    (kept, same), (left,) = (
        split_batch(groups, 2, keep_zero_advantage=True),
        split_batch(groups, 1, keep_zero_advantage=False),
    )
    assert kept.counts == same.counts
    per_token = [1.0, -1.0, -1.0, 0.0, 0.5, 0.5, -1.0, -1.0, -1.0]
    assert kept.counts.num_samples == kept.counts.num_batch_samples == 5
    assert (kept.counts.advantage_mean, kept.counts.advantage_std) == (np.mean(per_token), np.std(per_token))
    assert (left.counts.num_samples, left.counts.num_batch_samples) == (4, 5)
    assert kept.counts.num_samples_with_advantage == left.counts.num_samples_with_advantage == 4


def test_each_sample_of_a_share_knows_where_it_came_from():
    groups = [group(4, [1.0, -1.0]), group(7, [0.0, 0.5, -1.0])]
    for keep, wanted in ((True, {(4, 0), (4, 1), (7, 0), (7, 1), (7, 2)}), (False, {(4, 0), (4, 1), (7, 1), (7, 2)})):
        shares = split_batch(groups, 2, keep_zero_advantage=keep)
        assert {origin for share in shares for origin in share.origins} == wanted
        for share in shares:
            assert [number + 2 for _, number in share.origins] == share.samples.lengths.tolist()


def test_samples_without_gradient_leave_batch_and_denominator_together():
    groups = [group(0, [0.0, 0.0]), group(1, [1.0, 0.0, -1.0])]
    (share,) = split_batch(groups, 1, keep_zero_advantage=False)
    assert share.num_loss_tokens == 1 + 3
    assert share.samples.lengths.tolist() == [2, 4]
    (share,) = split_batch(groups, 1, keep_zero_advantage=True)
    assert share.num_loss_tokens == 3 + 6
    assert len(share.samples) == 5


def test_a_batch_without_gradient_gives_empty_shares():
    shares = split_batch([group(0, [0.0, 0.0])], 2, keep_zero_advantage=False)
    assert [share.samples for share in shares] == [None, None]
    assert [share.num_loss_tokens for share in shares] == [0, 0]


def test_an_advantage_that_is_not_a_number_is_not_lost_on_the_way():
    (share,) = split_batch([group(0, [np.nan, 0.0])], 1, keep_zero_advantage=False)
    assert np.isnan(share.samples.advantages).any()


def test_more_ranks_than_samples_leave_some_idle():
    shares = split_batch([group(0, [1.0])], 3, keep_zero_advantage=False)
    assert [share.samples is None for share in shares] == [False, True, True]
