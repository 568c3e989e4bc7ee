"""Records of routed experts: laid together, and renewed."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.core import routing
from forge_async.core.errors import ForgeError


def record(*experts, dtype=np.uint8):
    """One layer, one expert a token."""
    return np.array(experts, dtype=dtype).reshape(-1, 1, 1)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.int16), (512, np.int16)])
def test_the_dtype_is_narrow_and_has_a_number_to_spare(num_experts, dtype):
    assert routing.dtype_for(num_experts) is dtype
    nothing = np.zeros((0, 3, 2), dtype)
    made = routing.unknown(4, nothing)
    assert made.shape == (4, 3, 2) and made.dtype == dtype and (made >= num_experts).all()
    assert not routing.is_known(made).any() and routing.is_known(made * 0).all()


def test_parts_without_a_record_are_unknown_among_those_that_have_one():
    assert routing.lay_together([record(1, 2), None, record(3)], [2, 2, 1]).flatten().tolist() == [1, 2, 255, 255, 3]
    assert routing.lay_together([None, None], [2, 1]) is None


def test_what_is_computed_again_is_renewed_where_it_is_known():
    old, new = record(1, 2, 255), record(255, 5, 6, 255)
    assert routing.later(old, new).flatten().tolist() == [1, 5, 6, 255]
    assert routing.later(None, new) is new and routing.later(old, None) is old
    with pytest.raises(ForgeError, match="4 tokens were routed before, and only 3 now"):
        routing.later(new, old)
