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
    baseline: str = setting(
        "group_mean",
        "what a reward is compared with: the group's mean (GRPO), the mean of the others (RLOO), or nothing",
        choices=("group_mean", "leave_one_out", "none"),
    )
    unbiased: bool = setting(True, "scale=group_std divides by the sample's deviation (n - 1) instead of n")
    truncated: str = setting(
        "keep",
        "completions that the token limit cut off. keep: trained as they are; zero: they count in the baseline only",
        choices=("keep", "zero"),
    )
    overlong_tokens: int = setting(
        0,
        "the reward falls linearly over the last so many tokens before sampling.max_new_tokens; 0: not at all",
        unit="tokens",
        low=0,
    )
    overlong_weight: float = setting(1.0, "by how much it falls there", low=0.0)
    zero_variance: str = setting(
        "skip",
        "groups whose rewards are all equal. skip: counted, not computed; keep: computed with advantage 0; "
        "refill: ended as filtered, another prompt takes the place",
        choices=("skip", "keep", "refill"),
    )
