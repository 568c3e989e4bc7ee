"""Generalised advantage estimation over packed rows."""

from __future__ import annotations

import numpy as np


def gae(
    values: np.ndarray, rewards: np.ndarray, mask: np.ndarray, segments: np.ndarray, *, gamma: float, lambda_: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of each token, float32 [B, L], 0 outside the mask.

    delta_t = r_t + gamma * V_(t+1) - V_t and A_t = delta_t + gamma * lambda * A_(t+1), with V and A 0 after a sample's
    last token; the return is A_t + V_t (Schulman et al. 2016, GAE, eq. 16). Tokens outside the mask, such as an
    environment's answer between two turns, are stepped over.

    Args:
        values: [B, L], the value before each token.
        rewards: [B, L], what each token earned.
        mask: [B, L], 1 where the policy made the token.
        segments: [B, L], number of the sample; a sample's tokens are neighbours in one row.
    """
    values, rewards = values.astype(np.float64), rewards.astype(np.float64)
    num_rows, width = values.shape
    advantages = np.zeros_like(values)
    next_value, next_advantage = np.zeros(num_rows), np.zeros(num_rows)
    for at in reversed(range(width)):
        if at + 1 < width:
            same = segments[:, at] == segments[:, at + 1]
            next_value, next_advantage = next_value * same, next_advantage * same
        made = mask[:, at] > 0
        delta = rewards[:, at] + gamma * next_value - values[:, at]
        found = delta + gamma * lambda_ * next_advantage
        advantages[:, at] = np.where(made, found, 0.0)
        next_value = np.where(made, values[:, at], next_value)
        next_advantage = np.where(made, found, next_advantage)
    returns = (advantages + values) * (mask > 0)
    return advantages.astype(np.float32), returns.astype(np.float32)


def last_token_rewards(rewards: np.ndarray, mask: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """float32 [B, L]: a sample's reward, which `rewards` has at each of its tokens, at its last token in the mask."""
    found = np.zeros_like(rewards)
    for row in range(len(rewards)):
        made = np.flatnonzero(mask[row] > 0)
        is_last = np.append(segments[row, made[1:]] != segments[row, made[:-1]], True)[: len(made)]
        found[row, made[is_last]] = rewards[row, made[is_last]]
    return found
