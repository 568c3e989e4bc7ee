import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.versions import NOT_SAMPLED
from forge_async.learner.layout import Layout, lay_out
from forge_async.learner.rows import COLUMNS, build_micro_batches, empty_rows, lay_back, sequence_rows
from tests.strategies import make_samples
from tests.unit.learner.micro import laid_out


def test_two_samples_share_a_row_and_padding_is_a_document_of_its_own():
    samples = make_samples([[1, 1], [1], [1] * 5])
    samples = dataclasses.replace(samples, token_ids=samples.token_ids + 10)
    (rows,) = laid_out(samples, row_tokens=6, micro_batch_tokens=100)
    assert rows.token_ids.tolist() == [[10, 11, 12, 13, 14, 0], [15, 16, 17, 18, 19, 20]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert rows.targets.tolist() == [[11, 12, 0, 14, 0, 0], [16, 17, 18, 19, 20, 0]]
    assert rows.mask.tolist() == [[1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 0]]


def test_a_row_is_never_wider_than_all_samples_together():
    (rows,) = laid_out(make_samples([[1], [1]]), row_tokens=256, micro_batch_tokens=8192)
    assert rows.token_ids.shape == (1, 4)


def test_a_row_grows_to_the_longest_sample():
    batches = laid_out(make_samples([[1] * 20, [1]]), row_tokens=8, micro_batch_tokens=8)
    assert [rows.token_ids.shape for rows in batches] == [(1, 21), (1, 2)]


def test_nothing_to_train_makes_no_rows():
    assert laid_out(None, row_tokens=8, micro_batch_tokens=8) == []
    assert laid_out(make_samples([[1]]).select([]), row_tokens=8, micro_batch_tokens=8) == []


def test_empty_rows_train_nothing():
    rows = empty_rows()
    assert rows.mask.sum() == 0
    assert {getattr(rows, name).shape for name in COLUMNS} == {(1, 2)}


def test_each_token_knows_its_sample_and_the_version_of_what_follows_it():
    (rows,) = laid_out(make_samples([[7, 8], [9], [3] * 5]), row_tokens=6, micro_batch_tokens=100)
    none = NOT_SAMPLED
    assert rows.segments.tolist() == [[0, 0, 0, 1, 1, 3], [2] * 6]
    assert rows.steps.tolist() == [[7, 8, none, 9, none, none], [3, 3, 3, 3, 3, none]]
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
    assert laid_out(samples, row_tokens=6, micro_batch_tokens=100)[0].routed_experts is None
    samples = dataclasses.replace(samples, routed_experts=np.arange(22, dtype=np.int16).reshape(11, 1, 2))
    (rows,) = laid_out(samples, row_tokens=6, micro_batch_tokens=100)
    assert rows.routed_experts.shape == (2, 6, 1, 2) and rows.routed_experts.dtype == np.int16
    assert rows.routed_experts[0, :, 0, 0].tolist() == [0, 2, 4, 6, 8, 32767]
    assert rows.routed_experts[1, :, 0, 1].tolist() == [11, 13, 15, 17, 19, 21]


@given(st.lists(st.lists(st.just(1), min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 3))
def test_what_was_found_in_packed_rows_is_laid_back_to_the_tokens_it_is_of(steps, num_ranks):
    samples = make_samples(steps, prompt_tokens=2)
    numbers = np.where(samples.loss_mask, np.arange(samples.num_tokens), 0).astype(np.float32)
    samples = dataclasses.replace(samples, teacher_logprobs=numbers)
    flat = np.zeros_like(numbers)
    for batches in lay_out(samples.lengths.tolist(), Layout(row_tokens=16, micro_batch_tokens=32), num_ranks):
        for batch, rows in zip(batches, build_micro_batches(samples, batches), strict=True):
            found = np.full(rows.token_ids.shape, 99.0) if rows.teacher_logprobs is None else rows.teacher_logprobs
            lay_back(found, samples, batch, flat)
    assert flat.tolist() == numbers.tolist()
