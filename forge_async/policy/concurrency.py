"""How many sequences an engine is given at once: fixed, or found by additive increase, multiplicative decrease.

The rule is that of TCP's congestion control (Chiu and Jain, 1989), with the engine's signs of too much instead of lost
packets: a sequence that was preempted, sequences that wait inside the engine, a nearly full KV cache.
"""

from __future__ import annotations

from forge_async.core.errors import ConfigError
from forge_async.policy.ports import Occupancy

UNLIMITED = 1 << 30
KV_FULL = 0.95
"""Share of the KV cache above which the limit is lowered."""
KV_ROOM = 0.85
"""Share below which it may rise."""
CUT_TO = 0.75
"""What is left of the sequences in the engine after a cut."""


class ConcurrencyLimit:
    """The most sequences that the engine should hold. Pure: it moves only when it observes."""

    def __init__(self, low: int, high: int) -> None:
        """Starts at `high`; with `low` equal to it, it stays there."""
        self._low, self._high = low, high
        self.num_sequences = high
        """The limit now, between `low` and `high`."""

    @property
    def moves(self) -> bool:
        """Whether observing can change anything."""
        return self._low < self._high

    def observe(self, occupancy: Occupancy, *, num_preempted: int, num_queued: int) -> None:
        """Adapt after an engine step.

        Args:
            occupancy: of the engine, after the step.
            num_preempted: sequences preempted since the last call.
            num_queued: requests that wait outside for this limit.
        """
        inside = occupancy.num_running + occupancy.num_waiting
        pressed = num_preempted > 0 or occupancy.num_waiting > 0 or occupancy.kv_usage > KV_FULL
        if pressed and inside <= self.num_sequences:
            # A cut takes effect as sequences end; until then the same crowd must not be punished twice.
            self.num_sequences = max(self._low, int(inside * CUT_TO))
        elif not pressed and num_queued and occupancy.kv_usage < KV_ROOM:
            self.num_sequences = min(self._high, self.num_sequences + 1)


def concurrency_limit(word: str, max_sequences: int) -> ConcurrencyLimit:
    """The limit that `policy.concurrency` asks for: `all`, `auto`, or a number of sequences.

    Raises ConfigError for anything else.
    """
    if word == "all":
        return ConcurrencyLimit(UNLIMITED, UNLIMITED)
    if word == "auto":
        return ConcurrencyLimit(1, max_sequences)
    if word.isdecimal() and int(word) > 0:
        return ConcurrencyLimit(int(word), int(word))
    raise ConfigError(f"policy.concurrency={word} is neither all, auto nor a number of sequences above 0.")
