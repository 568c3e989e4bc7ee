import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.versions import NOT_SAMPLED
from forge_async.learner.batch import lay_out_samples
from forge_async.learner.layout import Layout
from forge_async.learner.rows import COLUMNS, build_micro_batches, empty_rows, lay_back, sequence_rows
from tests.strategies import make_samples
from tests.unit.learner.micro import laid_out


def test_two_samples_share_a_row_and_padding_is_a_document_of_its_own():
    samples = make_samples([[1, 1], [1], [1] * 5])
    samples = dataclasses.replace(samples, token_ids=samples.token_ids + 10)
    (rows,) = laid_out(samples, row_tokens=5, micro_batch_tokens=100)
    assert rows.token_ids.tolist() == [[10, 11, 13, 0, 0], [15, 16, 17, 18, 19]]
    assert rows.positions.tolist() == [[0, 1, 0, 0, 1], [0, 1, 2, 3, 4]]
    assert rows.targets.tolist() == [[11, 12, 14, 0, 0], [16, 17, 18, 19, 20]]
    assert rows.mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]


def test_what_begins_alike_is_laid_down_once_and_goes_on_at_its_own_position():
    samples = dataclasses.replace(
        make_samples([[1, 1], [2], [3]], prompt_tokens=4),
        token_ids=np.array([5, 6, 7, 8, 20, 21, 5, 6, 7, 8, 30, 5, 6, 9, 8, 40], np.int32),
    )
    (rows,) = laid_out(samples, row_tokens=10, micro_batch_tokens=100)
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 20, 8, 5, 6, 9, 8]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2, 3]]
    assert rows.targets.tolist() == [[6, 7, 8, 20, 21, 30, 6, 9, 8, 40]]
    assert rows.mask.tolist() == [[0, 0, 0, 1, 1, 1, 0, 0, 0, 1]]
    assert rows.segments.tolist() == [[0, 0, 0, 0, 0, 1, 2, 2, 2, 2]]
    (apart,) = laid_out(samples, row_tokens=12, micro_batch_tokens=100, share_prompts=False)
    assert apart.num_sample_tokens == 13 and rows.num_sample_tokens == 10


def test_a_single_token_stays_and_asks_for_nothing():
    samples = make_samples([[], [1]], prompt_tokens=1)
    (rows,) = laid_out(samples, row_tokens=8, micro_batch_tokens=100)
    assert rows.positions.tolist() == [[0, 0]] and rows.mask.tolist() == [[0, 1]]
    flat = np.zeros(3, np.float32)
    lay_back(np.array([[7.0, 8.0]]), samples, [[0, 1]], flat)
    assert flat.tolist() == [0, 0, 8]


def test_a_row_is_never_wider_than_all_samples_together():
    (rows,) = laid_out(make_samples([[1], [1]]), row_tokens=256, micro_batch_tokens=8192)
    assert rows.token_ids.shape == (1, 2)


def test_a_row_grows_to_the_longest_sample():
    batches = laid_out(make_samples([[1] * 20, [1]]), row_tokens=8, micro_batch_tokens=8)
    assert [rows.token_ids.shape for rows in batches] == [(1, 20), (1, 1)]


def test_nothing_to_train_makes_no_rows():
    assert laid_out(None, row_tokens=8, micro_batch_tokens=8) == []
    assert laid_out(make_samples([[1]]).select([]), row_tokens=8, micro_batch_tokens=8) == []


def test_empty_rows_train_nothing():
    rows = empty_rows()
    assert rows.mask.sum() == 0
    assert {getattr(rows, name).shape for name in COLUMNS} == {(1, 2)}


def test_each_token_knows_its_sample_and_the_version_of_what_follows_it():
    (rows,) = laid_out(make_samples([[7, 8], [9], [3] * 5]), row_tokens=5, micro_batch_tokens=100)
    none = NOT_SAMPLED
    assert rows.segments.tolist() == [[0, 0, 1, 3, 3], [2] * 5]
    assert rows.steps.tolist() == [[7, 8, 9, none, none], [3, 3, 3, 3, 3]]
    assert (rows.sample_indices, rows.num_segments) == ((0, 1, 2), 4)


def test_a_later_micro_batch_numbers_its_own_samples():
    first, second = laid_out(make_samples([[1] * 20, [1]]), row_tokens=8, micro_batch_tokens=8)
    assert (first.sample_indices, second.sample_indices) == ((0,), (1,))
    assert second.segments.max() == 0


def test_sequences_to_be_scored_get_a_row_each():
    rows = sequence_rows([np.array([5, 6, 7], np.int32), np.array([8], np.int32)])
    assert rows.token_ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert rows.targets.tolist() == [[6, 7, 0], [0, 0, 0]]
    assert rows.mask.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert rows.positions.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_tokens_own_experts_stand_in_its_place_and_padding_has_none():
    samples = make_samples([[1, 1], [1], [1] * 5])
    assert laid_out(samples, row_tokens=5, micro_batch_tokens=100)[0].routed_experts is None
    samples = dataclasses.replace(samples, routed_experts=np.arange(22, dtype=np.int16).reshape(11, 1, 2))
    (rows,) = laid_out(samples, row_tokens=5, micro_batch_tokens=100)
    assert rows.routed_experts.shape == (2, 5, 1, 2) and rows.routed_experts.dtype == np.int16
    assert rows.routed_experts[0, :, 0, 0].tolist() == [0, 2, 6, 32767, 32767]
    assert rows.routed_experts[1, :, 0, 1].tolist() == [11, 13, 15, 17, 19]


def test_samples_whose_prompts_took_other_experts_do_not_share_them():
    samples = dataclasses.replace(
        make_samples([[1], [1], [1]], prompt_tokens=3),
        token_ids=np.array([5, 6, 7, 20, 5, 6, 7, 30, 5, 6, 7, 40], np.int32),
        routed_experts=np.array([0, 1, 2, 3, 0, 1, 3, 3, 0, 2, 2, 3], np.uint8).reshape(12, 1, 1),
    )
    (rows,) = laid_out(samples, row_tokens=7, micro_batch_tokens=100)
    assert rows.token_ids.tolist() == [[5, 6, 7, 7, 5, 6, 7]]
    assert rows.routed_experts.ravel().tolist() == [0, 1, 2, 3, 0, 2, 2]


@given(
    st.lists(st.lists(st.just(1), min_size=1, max_size=9), min_size=1, max_size=12),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_what_was_found_in_packed_rows_is_laid_back_to_the_tokens_it_is_of(steps, num_ranks, prompt_tokens, prompts):
    samples = make_samples(steps, prompt_tokens=prompt_tokens)
    samples = dataclasses.replace(samples, token_ids=np.where(samples.loss_mask, samples.token_ids, 0))
    samples.token_ids[samples.bounds()[:-1]] = np.arange(len(samples)) % prompts
    numbers = np.where(samples.loss_mask, np.arange(samples.num_tokens), 0).astype(np.float32)
    samples = dataclasses.replace(samples, teacher_logprobs=numbers)
    flat = np.zeros_like(numbers)
    ranks, skipped = lay_out_samples(samples, Layout(row_tokens=16, micro_batch_tokens=32), num_ranks)
    for batches in ranks:
        for batch, rows in zip(batches, build_micro_batches(samples, batches, skipped), strict=True):
            found = np.full(rows.token_ids.shape, 99.0) if rows.teacher_logprobs is None else rows.teacher_logprobs
            lay_back(found, samples, batch, flat, skipped)
    assert flat.tolist() == numbers.tolist()
