"""Which ready groups are taken."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError
from forge_async.replay.order import ORDERS, select
from forge_async.replay.settings import AsyncSettings


def test_strict_order_waits_for_the_oldest() -> None:
    ready = {1: 0, 2: 0, 3: 0}
    assert select([0, 1, 2, 3], ready, window=1, groups_per_step=2, order="windowed_fifo") is None
    assert select([0, 1, 2, 3], {0: 0, **ready}, window=1, groups_per_step=2, order="windowed_fifo") == (0, 1)


def test_fifo_ignores_the_window() -> None:
    assert select([0, 1, 2], {1: 0, 2: 0}, window=9, groups_per_step=2, order="fifo") is None


def test_a_window_looks_past_a_straggler_but_only_so_far() -> None:
    untaken, ready = [0, 1, 2, 3], {1: 0, 2: 0, 3: 0}
    assert select(untaken, ready, window=3, groups_per_step=2, order="windowed_fifo") == (1, 2)
    assert select(untaken, ready, window=3, groups_per_step=3, order="windowed_fifo") is None
    assert select(untaken, ready, window=4, groups_per_step=3, order="windowed_fifo") == (1, 2, 3)


def test_the_window_counts_indices_not_groups() -> None:
    """Groups 1 to 3 have gone: with W = 3 group 4 is out of reach while group 0 is missing, though it is the second."""
    assert select([0, 4], {4: 0}, window=3, groups_per_step=1, order="windowed_fifo") is None
    assert select([0, 4], {4: 0}, window=5, groups_per_step=1, order="windowed_fifo") == (4,)


def test_freshest_first_stays_inside_the_window_and_hands_out_sorted() -> None:
    untaken, ready = [0, 1, 2, 3, 4], {0: 3, 1: 5, 2: 4, 3: 9, 4: 9}
    assert select(untaken, ready, window=3, groups_per_step=2, order="freshest") == (1, 2)
    assert select(untaken, ready, window=5, groups_per_step=2, order="freshest") == (3, 4)


def test_taking_the_oldest_slides_the_window_within_a_batch() -> None:
    untaken, ready = [0, 1, 2], {0: 9, 1: 5, 2: 9}
    assert select(untaken, ready, window=2, groups_per_step=2, order="freshest") == (0, 2)


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ConfigError, match="lifo"):
        select([0], {0: 0}, window=1, groups_per_step=1, order="lifo")


def by_the_definition(untaken, ready, window, groups_per_step, order):
    """Pick one after the other, exactly as the rule is written."""
    left, picked = list(untaken), []
    width = 1 if order == "fifo" else window
    while left and len(picked) < groups_per_step:
        choices = [index for index in left if index in ready and index < left[0] + width]
        if not choices:
            return None
        picked.append(min(choices, key=lambda index: ORDERS[order](index, ready[index])))
        left.remove(picked[-1])
    return tuple(sorted(picked)) if len(picked) == groups_per_step else None


@settings(max_examples=50)
@given(
    untaken=st.sets(st.integers(0, 20), max_size=12).map(sorted),
    steps=st.lists(st.integers(0, 4), min_size=21, max_size=21),
    missing=st.sets(st.integers(0, 20), max_size=5),
)
def test_selecting_equals_the_rule_as_it_is_written(untaken, steps, missing) -> None:
    ready = {index: steps[index] for index in untaken if index not in missing}
    for window, num, order in product((1, 2, 4, 30), (1, 2, 3), ORDERS):
        got = select(untaken, ready, window=window, groups_per_step=num, order=order)
        assert got == by_the_definition(untaken, ready, window, num, order)


def test_only_the_freshest_groups_are_not_chosen_ahead_of_their_step() -> None:
    ahead = {order: AsyncSettings(order=order, window=4).takes_ahead for order in ORDERS}
    assert ahead == {order: order != "freshest" for order in ORDERS} and not all(ahead.values())
