"""Settings of rollout workers."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """Keys under `rollout`."""

    workers: int = setting(1, "rollout worker processes (turns and environments)", low=1)
    reward_workers: int = setting(1, "reward processes of each rollout worker", low=1)
    linger_s: float = setting(
        0.1,
        "how long finished groups wait for others, to travel in one message; the last of a batch wait for none",
        unit="s",
        low=0.0,
    )
    timeout_s: float = setting(
        300.0, "longest time of a rollout; it is then cut off, and its group goes on with the others", unit="s", low=0.1
    )
    min_rollouts: int = setting(
        2, "finished rollouts that a group with cut ones needs to be trained on; with fewer it is replaced", low=2
    )
    group_timeout_s: float = setting(
        600.0, "longest time of a group from its requests to its rewards; it is then replaced", unit="s", low=0.1
    )
