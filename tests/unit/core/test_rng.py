import itertools

import numpy as np

from forge_async.core.rng import NUM_SAMPLE_SEEDS, SAMPLE_SEED_SPACING, derive_seed, request_seed, stream


def test_seeds_are_the_same_on_every_machine_and_in_every_version():
    assert derive_seed(0) == 872845860
    assert derive_seed(1, "sample", 3, 0) == 1414834889
    assert request_seed(0, 0, 0) == 782413824
    assert stream(0, "shuffle").integers(1000) == 42


def test_every_name_and_its_order_matter():
    seeds = {derive_seed(*names) for names in itertools.product((0, 1), ("a", "b"), ("a", "b", 1))}
    assert len(seeds) == 12


def test_no_two_groups_share_a_stream_whatever_their_size():
    for run_seed, turn in itertools.product((0, 1, 12345), (0, 1, 7)):
        seeds = np.array([request_seed(run_seed, index, turn) for index in range(20_000)])
        assert (np.diff(np.sort(seeds)) >= SAMPLE_SEED_SPACING).all()
        assert (seeds % SAMPLE_SEED_SPACING == 0).all()
        assert seeds.min() >= 0
        assert seeds.max() + SAMPLE_SEED_SPACING <= 2**31


def test_groups_have_seeds_of_their_own_for_half_a_million_groups():
    assert NUM_SAMPLE_SEEDS == 2**19
    assert request_seed(3, 0, 0) == request_seed(3, NUM_SAMPLE_SEEDS, 0) != request_seed(3, NUM_SAMPLE_SEEDS - 1, 0)


def test_runs_and_turns_begin_at_different_places():
    assert len({request_seed(run_seed, 0, turn) for run_seed in range(20) for turn in range(20)}) > 390


def test_a_named_stream_is_independent_of_others():
    a, b = stream(0, "a"), stream(0, "b")
    first = a.integers(1 << 30, size=4).tolist()
    b.integers(10)
    assert stream(0, "a").integers(1 << 30, size=4).tolist() == first
