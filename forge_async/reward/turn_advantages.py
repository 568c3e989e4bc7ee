"""Advantages of turns: what each turn of a rollout led to, against the turns of the other rollouts of its group.

Rewards stand at the turns that earned them; a rollout with one reward has it at its last turn. With one turn a rollout
all of this is `group_advantages`. `rollout.turns` lays advantages of turns on the tokens of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from forge_async.core.errors import ConfigError, RewardError
from forge_async.reward.advantages import group_advantages

PEERS = ("turn", "group")


def turn_returns(rewards: Sequence[np.ndarray], discount: float = 1.0) -> list[np.ndarray]:
    """Of each turn its own reward and the discounted later ones, G_k = r_k + discount * G_(k+1): float64 [turns] each.

    Args:
        rewards: for each rollout of the group [turns], finite.
        discount: of a turn, from 0 (a turn is answerable for its own reward only) to 1 (for all that followed).

    Raises ConfigError for another discount, RewardError for a rollout without a turn or a reward that is not finite.
    """
    if not 0 <= discount <= 1:
        raise ConfigError(f"A turn's discount is from 0 to 1, not {discount:g}.")
    found = [np.array(each, dtype=np.float64) for each in rewards]
    for number, returns in enumerate(found):
        if not len(returns) or not np.isfinite(returns).all():
            raise RewardError(f"Rollout {number} has the rewards {returns.tolist()}: give a finite one for each turn.")
        for turn in range(len(returns) - 2, -1, -1):
            returns[turn] += discount * returns[turn + 1]
    return found


def turn_advantages(
    rewards: Sequence[np.ndarray],
    *,
    discount: float = 1.0,
    peers: str = "turn",
    scale: str = "group_std",
    baseline: str = "group_mean",
    unbiased: bool = True,
) -> list[np.ndarray]:
    """Advantages of turns by their returns, for each rollout of one group float32 [turns].

    Args:
        rewards, discount: as above.
        peers: whose returns a turn's is compared with. "turn": those of the same turn of the other rollouts, as far as
            they came (Zeng et al. 2025, turn-level credit assignment); a turn that no other rollout reached gets 0.
            "group": those of all turns of the group (Baronio et al. 2025, Kevin), where early turns, which have more
            ahead of them, are compared with late ones.
        scale, baseline, unbiased: as `group_advantages` takes them, over the peers. "leave_one_out" leaves out the
            rollout's own turns, all of them.
    """
    returns = turn_returns(rewards, discount)
    if peers == "turn":
        of_turns = [
            group_advantages(np.array([each for each in same if each is not None]), scale, baseline, unbiased).tolist()
            for same in zip_longest(*returns)
        ]
        return [np.array([of_turns[turn].pop(0) for turn in range(len(each))], dtype=np.float32) for each in returns]
    if peers != "group":
        raise ConfigError(f"peers={peers} is not one of {', '.join(PEERS)}.")
    pooled = np.concatenate([*returns, np.zeros(0)])
    own = "group_mean" if baseline == "leave_one_out" else baseline
    found = np.split(group_advantages(pooled, scale, own, unbiased), np.cumsum([len(each) for each in returns])[:-1])
    return _without_own(found) if baseline == "leave_one_out" else found


def _without_own(centred: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Advantages over the mean of all turns made such over the mean of the other rollouts' turns."""
    total, count = sum(float(each.sum(dtype=np.float64)) for each in centred), sum(len(each) for each in centred)
    found = []
    for each in centred:
        others = max(count - len(each), 1)
        mean = (total - float(each.sum(dtype=np.float64))) / others
        found.append((each - mean if count > len(each) else np.zeros_like(each)).astype(np.float32))
    return found
