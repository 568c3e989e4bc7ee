"""Named random streams: every seed of a run derives from the run's seed and a name, never from global state."""

from __future__ import annotations

import hashlib

import numpy as np

SAMPLE_SEED_SPACING = 1 << 12
"""Seeds of different groups differ by at least this; engines give sample i of a request the seed `seed + i`."""
NUM_SAMPLE_SEEDS = (1 << 31) // SAMPLE_SEED_SPACING
"""How many groups have seeds of their own."""


def derive_seed(run_seed: int, *names: str | int) -> int:
    """Return a seed in [0, 2**31) that depends on `run_seed` and on every name, in order.

    Stable across processes, machines and Python versions.
    """
    text = "/".join([str(run_seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def request_seed(run_seed: int, group_index: int, turn: int) -> int:
    """Seed of a group's request for one turn; rollout i of the group samples with the returned value plus i.

    Groups count up from a place that run and turn choose, so that for groups of up to 4,096 rollouts no two of 2**19
    groups in a row share a stream. (Hashing the group too would make two of them meet after some hundreds of groups:
    torch's CPU generator tells only 2**32 seeds apart.)
    """
    first = derive_seed(run_seed, "sample", turn) // SAMPLE_SEED_SPACING
    return (first + group_index) % NUM_SAMPLE_SEEDS * SAMPLE_SEED_SPACING


def stream(run_seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator of its own for the named purpose."""
    return np.random.default_rng(derive_seed(run_seed, *names))
