"""Numbers taken ahead are those that the generators give one by one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.backends.vllm_seeds import HIGHEST, NUM_AHEAD, NumbersAhead


@given(st.lists(st.sets(st.integers(0, 3), min_size=1), max_size=3 * NUM_AHEAD))
def test_each_generator_gives_its_own_numbers_in_order_whoever_asks_when(steps):
    ahead = NumbersAhead()
    asked, own = ([torch.Generator().manual_seed(seed) for seed in range(4)] for _ in range(2))
    for step in steps:
        wanted = [int(torch.randint(0, HIGHEST, (1,), generator=own[seed])) for seed in step]
        assert ahead.next([asked[seed] for seed in step]) == wanted


def test_what_is_kept_of_a_generator_goes_with_it():
    """Another one may be given its id, and must not be given its numbers."""
    ahead = NumbersAhead()
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        first = int(torch.randint(0, HIGHEST, (1,), generator=torch.Generator().manual_seed(seed)))
        assert ahead.next([generator]) == [first]
        assert len(ahead) == 1
        del generator
        assert len(ahead) == 0
