"""Settings of advantages and filters."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Keys under `advantage`."""

    scale: str = setting(
        "group_std",
        "what a group's centred rewards are divided by: its standard deviation (GRPO), or nothing (Dr. GRPO)",
        choices=("group_std", "none"),
    )
    zero_variance: str = setting(
        "skip",
        "groups whose rewards are all equal. skip: counted, not computed; keep: computed with advantage 0; "
        "refill: ended as filtered, another prompt takes the place",
        choices=("skip", "keep", "refill"),
    )
