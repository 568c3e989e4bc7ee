"""What an evaluation's scores say: means with 95% intervals, and pass@k. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.rng import stream

Z95 = 1.959964
"""Of a normal distribution, 95% lies within this many standard deviations of the mean."""
RESAMPLES = 1000
"""Of a bootstrap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over held-out prompts, with what it says of all prompts like them."""

    mean: float
    low: float
    """Lower end of the 95% interval."""
    high: float
    """Upper end of the same."""


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that at least one of k samples of a prompt solves it, without bias (Chen et al. 2021, equation 1).

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the samples that hold a solved one.

    Args:
        num_samples: n, samples drawn of the prompt; at least k.
        num_solved: c, how many of them solved it.
        k: tries.
    """
    if not 1 <= k <= num_samples or not 0 <= num_solved <= num_samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples and solved <= samples: {num_solved} of {num_samples}.")
    return 1 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def wilson(num_solved: int, num: int) -> Estimate:
    """A share and its interval (Wilson 1927), which is never empty and never leaves [0, 1]."""
    share, z2 = num_solved / num, Z95**2
    centre = (share + z2 / (2 * num)) / (1 + z2 / num)
    half = Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    return Estimate(mean=share, low=max(0.0, min(share, centre - half)), high=min(1.0, max(share, centre + half)))


def bootstrap(values: Sequence[float], seed: int) -> Estimate:
    """A mean and its percentile interval (Efron 1979): prompts are drawn again with replacement.

    Args:
        values: one for each prompt.
        seed: the run's; the same values give the same interval.
    """
    all_values, draws = np.asarray(values, dtype=np.float64), stream(seed, "evaluation", "bootstrap")
    num = len(all_values)
    means = [all_values[draws.integers(num, size=num)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, [2.5, 97.5])
    return Estimate(mean=float(all_values.mean()), low=float(low), high=float(high))


def estimate(values: Sequence[float], seed: int) -> Estimate:
    """The mean of one value for each prompt: with Wilson's interval where all are 0 or 1, else with a bootstrap's.

    A bootstrap of values that are all alike would claim to know the mean exactly.
    """
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(map(int, values)), len(values))
    return bootstrap(values, seed)
