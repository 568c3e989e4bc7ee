"""Named random streams: every seed of a run derives from the run's seed and a name, never from global state."""

from __future__ import annotations

import hashlib

import numpy as np

SAMPLE_SEED_SPACING = 1 << 12
"""Seeds of different groups differ by at least this; engines give sample i of a request the seed `seed + i`."""


def derive_seed(run_seed: int, *names: str | int) -> int:
    """Return a seed in [0, 2**31) that depends on `run_seed` and on every name, in order.

    Stable across processes, machines and Python versions.
    """
    text = "/".join([str(run_seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def request_seed(run_seed: int, group_index: int, turn: int) -> int:
    """Seed of a group's request for one turn; rollout i of the group samples with the returned value plus i.

    The low 12 bits are cleared, so that up to 4,096 rollouts of a group never share a stream with another group
    whose seed differs.
    """
    return derive_seed(run_seed, "sample", group_index, turn) // SAMPLE_SEED_SPACING * SAMPLE_SEED_SPACING


def stream(run_seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator of its own for the named purpose."""
    return np.random.default_rng(derive_seed(run_seed, *names))
