import numpy as np

from forge_async.learner.packing import balanced_micro_batches, micro_batches, pack_rows, partition, sample_costs


def test_the_longest_samples_are_placed_first_into_the_first_row_that_holds_them():
    assert pack_rows([3, 7, 5, 2, 3], 10) == [[0, 1], [2, 3, 4]]


def test_a_sample_longer_than_a_row_gets_one_of_its_own():
    assert pack_rows([12, 1, 9], 10) == [[0], [1, 2]]


def test_rows_are_cut_by_what_they_cost_with_padding():
    assert micro_batches([4, 4, 4], 8) == [[0, 1], [2]]
    assert micro_batches([2, 2, 6, 2], 8) == [[0, 1], [2], [3]]
    assert micro_batches([20, 1], 8) == [[0], [1]]
    assert micro_batches([], 8) == []


def test_ranks_get_even_loads():
    assert partition([5, 4, 3, 3, 3], 2) == [[0, 3], [1, 2, 4]]


def test_ranks_without_a_sample_get_an_empty_share():
    assert partition([5], 3) == [[0], [], []]


def test_a_long_sample_weighs_against_more_tokens_in_short_ones():
    costs = sample_costs(np.array([8, 2, 2, 2, 2, 2, 2]), attention_tokens=4).tolist()
    assert costs == [24, 3, 3, 3, 3, 3, 3]
    assert partition(costs, 2) == [[0], [1, 2, 3, 4, 5, 6]]


def test_micro_batches_are_even_in_cost_and_begin_with_the_costliest():
    assert balanced_micro_batches([4, 4, 4, 4], [9, 1, 2, 8], 8, 2) == [[0, 1], [2, 3]]
    assert balanced_micro_batches([4, 4, 4], [1, 5, 1], 8, 2) == [[1], [0, 2]]
    assert balanced_micro_batches([4], [1], 8, 3) == [[0], [], []]
