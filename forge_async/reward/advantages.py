"""Advantages of a group: each rollout's reward against those of the same prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.errors import ConfigError
from forge_async.reward.settings import AdvantageSettings

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, so that nearly equal rewards do not become huge advantages."""
BASELINES = ("group_mean", "leave_one_out", "none")
SCALES = ("group_std", "none")


def group_advantages(
    rewards: np.ndarray, scale: str = "group_std", baseline: str = "group_mean", unbiased: bool = True
) -> np.ndarray:
    """Return float32 [..., G], the advantage of each rollout of a group, or of many groups of a size.

    Args:
        rewards: [..., G], one finite number for each rollout; the last axis is a group.
        scale: "group_std": divided by std + 1e-4, as GRPO does (DeepSeekMath, Shao et al. 2024, section 4.1.2);
            "none": not divided, which would favour prompts of low variance (Dr. GRPO, Liu et al. 2025).
        baseline: "group_mean": r - mean (GRPO); "leave_one_out": r - mean of the others, which is unbiased (RLOO,
            Kool et al. 2019); "none": r, for objectives with a baseline of their own.
        unbiased: the sample standard deviation (ddof 1) rather than the population's (ddof 0).

    A baseline leaves a group of one rollout, or of equal rewards, exactly 0. Raises ConfigError for another word.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    _check("advantage.scale", scale, SCALES)
    _check("advantage.baseline", baseline, BASELINES)
    divisor = _std(rewards, unbiased) + STD_EPSILON if scale == "group_std" else 1.0
    advantages = (_centred(rewards, baseline) / divisor).astype(np.float32)
    if baseline != "none":
        advantages[_are_equal(rewards)] = 0  # exactly; rounding can leave equal rewards a little off their mean
    return advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a group's rewards say."""

    advantages: np.ndarray
    """float32 [G], one for each rollout."""
    zero_variance: bool
    """Whether all its shaped rewards are equal, so that it teaches nothing."""


def judged(
    rewards: Sequence[np.ndarray],
    lengths: Sequence[np.ndarray],
    truncated: Sequence[np.ndarray],
    max_new_tokens: int,
    settings: AdvantageSettings,
) -> list[Judged]:
    """Shape the rewards of many groups, [G] of each with the lengths of its completions and whether the token limit
    ended them, and compare them within their group. Groups of a size are worked on together, since numpy takes about
    as long over one as over a hundred."""
    of_size: dict[int, list[int]] = {}
    for number, each in enumerate(rewards):
        of_size.setdefault(len(each), []).append(number)
    found: dict[int, Judged] = {}
    for size, numbers in of_size.items():
        of_groups, tokens, cut = (
            np.concatenate([column[number] for number in numbers]).reshape(len(numbers), size)
            for column in (rewards, lengths, truncated)
        )
        shaped = shaped_rewards(of_groups, tokens, max_new_tokens, settings)
        rows = zip(numbers, rollout_advantages(shaped, cut, settings), _are_equal(shaped).tolist(), strict=True)
        found |= {number: Judged(advantages=row, zero_variance=equal) for number, row, equal in rows}
    return [found[number] for number in range(len(rewards))]


def rollout_advantages(rewards: np.ndarray, truncated: np.ndarray, settings: AdvantageSettings) -> np.ndarray:
    """float32 [..., G]: the advantages of a group, or of many of a size, as the settings ask for them.

    With `advantage.truncated=zero` rollouts that the token limit cut off count in the baseline, but are not trained on
    (overlong filtering; DAPO, Yu et al. 2025, section 3.4).

    Args:
        rewards: [..., G], shaped.
        truncated: bool [..., G].
    """
    advantages = group_advantages(rewards, settings.scale, settings.baseline, settings.unbiased)
    if settings.truncated == "zero":
        advantages[truncated] = 0
    return advantages


def shaped_rewards(
    rewards: np.ndarray, lengths: np.ndarray, max_new_tokens: int, settings: AdvantageSettings
) -> np.ndarray:
    """[..., G]: rewards with the penalty for overlong completions, where `advantage.overlong_tokens` asks for one."""
    if settings.overlong_tokens == 0:
        return rewards
    penalty = overlong_penalty(lengths, max_new_tokens, settings.overlong_tokens)
    return rewards + settings.overlong_weight * penalty.astype(rewards.dtype)


def overlong_penalty(lengths: np.ndarray, max_new_tokens: int, overlong_tokens: int) -> np.ndarray:
    """float64 [..., G], from 0 to -1: soft overlong punishment (DAPO, Yu et al. 2025, eq. 13).

    0 up to max_new_tokens - overlong_tokens, then falling linearly to -1 at max_new_tokens.
    """
    over = np.asarray(lengths, dtype=np.float64) - (max_new_tokens - overlong_tokens)
    return -np.clip(over / overlong_tokens, 0.0, 1.0)


def process_advantages(rewards: Sequence[np.ndarray], *, unbiased: bool = True) -> list[np.ndarray]:
    """Advantages of turns that are rewarded one by one: for each rollout float32 [turns].

    GRPO with process supervision (DeepSeekMath, Shao et al. 2024, section 4.1.3): every reward is normalised by mean
    and deviation of all turns of the group, and a turn's advantage is the sum of its own and the later ones.

    Args:
        rewards: for each rollout of the group [turns], at least one turn in all.
        unbiased: as above.
    """
    pooled = np.concatenate([np.asarray(each, dtype=np.float64) for each in rewards])
    if is_zero_variance(pooled):
        return [np.zeros(len(each), dtype=np.float32) for each in rewards]
    mean, divisor = pooled.mean(), _std(pooled, unbiased) + STD_EPSILON
    normal = [(np.asarray(each, dtype=np.float64) - mean) / divisor for each in rewards]
    return [np.cumsum(each[::-1])[::-1].astype(np.float32) for each in normal]


def is_zero_variance(rewards: np.ndarray) -> bool:
    """Whether all rewards of a group are equal, so that it teaches nothing. True for groups of none or one.

    Compares the extremes instead of a standard deviation, which rounding can make positive for equal numbers.
    """
    return bool(_are_equal(np.asarray(rewards)))


def _are_equal(rewards: np.ndarray) -> np.ndarray:
    """bool [...], of each group."""
    if not rewards.shape[-1]:
        return np.ones(rewards.shape[:-1], dtype=bool)
    return rewards.max(-1) == rewards.min(-1)


def _centred(rewards: np.ndarray, baseline: str) -> np.ndarray:
    if baseline == "none" or not rewards.size:
        return rewards
    centred, size = rewards - rewards.mean(-1, keepdims=True), rewards.shape[-1]
    return centred * (size / (size - 1)) if baseline == "leave_one_out" and size > 1 else centred


def _std(rewards: np.ndarray, unbiased: bool) -> np.ndarray:
    """float64 [..., 1]."""
    if not rewards.size:
        return np.zeros((*rewards.shape[:-1], 1))
    return rewards.std(-1, ddof=1 if unbiased and rewards.shape[-1] > 1 else 0, keepdims=True)


def _check(key: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")
