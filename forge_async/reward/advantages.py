"""Advantages of a group: each rollout's reward against those of the same prompt."""

from __future__ import annotations

import numpy as np

from forge_async.core.errors import ConfigError

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, so that nearly equal rewards do not become huge advantages."""


def group_advantages(rewards: np.ndarray, scale: str = "group_std") -> np.ndarray:
    """Return float32 [G], the advantage of each rollout of one group.

    Args:
        rewards: [G], one finite number for each rollout.
        scale: "group_std": (r - mean) / (std + 1e-4), with the sample standard deviation (ddof 1), as GRPO does
            (DeepSeekMath, Shao et al. 2024); "none": r - mean, without the division that favours prompts of low
            variance (Dr. GRPO, Liu et al. 2025).

    A group of one rollout has no baseline but itself and gets advantage 0. Raises ConfigError for another scale.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if scale not in ("group_std", "none"):
        raise ConfigError(f"advantage.scale={scale} is not one of group_std, none.")
    if is_zero_variance(rewards):
        return np.zeros(len(rewards), dtype=np.float32)
    centred = rewards - rewards.mean()
    divisor = rewards.std(ddof=1) + STD_EPSILON if scale == "group_std" else 1.0
    return (centred / divisor).astype(np.float32)


def is_zero_variance(rewards: np.ndarray) -> bool:
    """Whether all rewards of a group are equal, so that it teaches nothing. True for groups of none or one.

    Compares the extremes instead of a standard deviation, which rounding can make positive for equal numbers.
    """
    rewards = np.asarray(rewards)
    return len(rewards) == 0 or bool(rewards.max() == rewards.min())
