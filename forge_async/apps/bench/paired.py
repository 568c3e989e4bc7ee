"""The mean of paired differences, with Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

T95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip
"""0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom; the last serves for more, which makes
the interval a little too wide."""


def paired_difference(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean, lower and upper end of its 95% interval (Student 1908): mean -+ t * s / sqrt(n); wide open for one pair."""
    mean, num = fmean(differences), len(differences)
    if num < 2:
        return mean, -math.inf, math.inf
    half = T95[min(num - 1, len(T95)) - 1] * stdev(differences) / math.sqrt(num)
    return mean, mean - half, mean + half
