"""Which prompts are held out."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_async.prompt.split import is_held_out


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
