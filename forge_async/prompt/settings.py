"""Settings of the task that prompts are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSettings:
    """Keys under `task`."""

    name: str = setting("spell", "a built-in task (sum, spell) or a reasoning-gym data set such as chain_sum")
    options: dict[str, str | int | float | bool] = setting(
        {}, "options of the reasoning-gym data set, such as {max_terms: 3}"
    )
    num_prompts: int = setting(10_000, "prompts of one epoch of a procedural task", low=1)
    held_out_fraction: float = setting(
        0.2, "share of prompts kept for evaluation, chosen by a hash of the text", low=0.0, high=0.9
    )
    demonstration_fraction: float = setting(
        0.5,
        "share of the other prompts that only apps.sft and the warm start see; 0: they see the training prompts",
        low=0.0,
        high=0.9,
    )
    chat: str = setting(
        "auto", "render prompts with the model's chat template; auto: when it has one", choices=("auto", "on", "off")
    )
    system: str = setting("", "system message of the chat; empty: none")
