"""Which prompts are held out."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.prompt.split import is_demonstration, is_demonstration_by_crc, is_held_out


@given(st.text())
def test_a_fifth_is_what_the_recipe_holds_out(text):
    assert is_held_out(text, 0.2) == (zlib.crc32(text.encode()) % 5 == 0)


@given(st.text())
def test_nothing_is_held_out_at_zero(text):
    assert not is_held_out(text, 0.0)


@pytest.mark.parametrize("fraction", [0.05, 0.1, 0.25, 1 / 3, 0.9])
def test_the_share_held_out_is_the_fraction(fraction):
    held_out = sum(is_held_out(f"question number {n}", fraction) for n in range(5000))
    assert abs(held_out / 5000 - fraction) < 0.03


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9])
def test_the_share_of_demonstrations_is_the_fraction(fraction):
    shown = sum(is_demonstration(f"question number {n}", fraction) for n in range(5000))
    assert abs(shown / 5000 - fraction) < 0.03


def shares_by_parity(is_shown):
    """Of two classes of single-digit additions, by the parity of some bits of their digits: the share that is shown."""
    shown = {0: [], 1: []}
    for first in range(8):
        for second in range(8):
            parity = (first.bit_count() + second) % 2
            shown[parity].append(is_shown(f"{first}+{second}=", 0.5))
    return [sum(each) / len(each) for each in shown.values()]


def test_demonstrations_are_not_all_of_one_kind():
    assert all(0.3 < share < 0.7 for share in shares_by_parity(is_demonstration))
    assert sorted(shares_by_parity(is_demonstration_by_crc)) == [0, 1], "why only what must stay as it is uses it"
