"""V-trace over packed rows, with turns as the actions: advantages and returns from values, for old samples."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

LOG_LIMIT = 20.0
"""A turn's log-ratio is limited to this before it is exponentiated."""


def vtrace_targets(
    values: np.ndarray,
    rewards: np.ndarray,
    log_ratio: np.ndarray,
    mask: np.ndarray,
    segments: np.ndarray,
    *,
    gamma: float,
    rho_max: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns of each token, float32 [B, L], 0 outside the mask; those of its turn.

    With R_k what turn k earned, V_k the value before its first token, r_k the product of pi/mu over its tokens,
    rho_k = min(r_k, rho_max), c_k = min(r_k, 1), and v and V 0 after a sample's last turn:

        v_k = V_k + rho_k (R_k + gamma V_(k+1) - V_k) + gamma c_k (v_(k+1) - V_(k+1))
        A_k = rho_k (R_k + gamma v_(k+1) - V_k)

    (Espeholt et al. 2018, IMPALA, remark 1 and section 4.2). The return that values learn is v_k. A_k holds the
    importance ratio already, so that no correction may weigh it once more. With values of 0 it is what
    `corrections.vtrace` makes of the reward.

    Args:
        values: [B, L], the value before each token.
        rewards: [B, L], what each token earned.
        log_ratio: [B, L], log(pi/mu) of each token at the step's start.
        mask: [B, L], 1 where the policy made the token; a turn is a run of such tokens of one sample.
        segments: [B, L], number of the sample; a sample's tokens are neighbours in one row.
    """
    advantages, returns = np.zeros(values.shape), np.zeros(values.shape)
    for row in range(len(values)):
        sample, next_value, next_target = -1, 0.0, 0.0
        for start, stop in reversed(list(_turns(mask[row], segments[row]))):
            if segments[row, start] != sample:
                sample, next_value, next_target = int(segments[row, start]), 0.0, 0.0
            turn = (row, slice(start, stop))
            earned, value = float(rewards[turn].sum()), float(values[row, start])
            ratio = math.exp(float(np.clip(log_ratio[turn].sum(), -LOG_LIMIT, LOG_LIMIT)))
            rho, c = min(ratio, rho_max), min(ratio, 1.0)
            target = value + rho * (earned + gamma * next_value - value) + gamma * c * (next_target - next_value)
            advantages[turn], returns[turn] = rho * (earned + gamma * next_target - value), target
            next_value, next_target = value, target
    return advantages.astype(np.float32), returns.astype(np.float32)


def _turns(mask: np.ndarray, segments: np.ndarray) -> Iterator[tuple[int, int]]:
    """Start and end of each turn of a row."""
    made = np.flatnonzero(mask > 0)
    if not len(made):
        return
    begins = np.append(True, (np.diff(made) > 1) | (np.diff(segments[made]) != 0))
    starts = made[begins]
    ends = np.append(made[np.flatnonzero(begins)[1:] - 1], made[-1]) + 1
    yield from zip(starts.tolist(), ends.tolist(), strict=True)
