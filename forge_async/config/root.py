"""Settings of the whole run that belong to no single room; their keys have no prefix."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RootSettings:
    """Keys without a prefix, such as `steps=50`."""

    seed: int = setting(0, "every random choice of the run derives from it", low=0)
    steps: int = setting(260, "learner steps to take", unit="steps", low=1)
    prompts: str = setting("", "a .jsonl file of prompts; empty: the prompts of task.name")
    reward: str = setting("", "reward function, package.module:function or file.py:function; empty: the task's own")
    reward_timeout_s: float = setting(10.0, "longest time one reward call may take", unit="s", low=0.01)
    group_size: int = setting(8, "rollouts of each prompt (G)", low=1)
    groups_per_step: int = setting(64, "groups that one learner step consumes (P)", low=1)
