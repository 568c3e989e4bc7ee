"""`async.max_staleness=auto`: the least S under which no stage waits for another, from what a run measures.

While one batch is trained, the next ones must be on their way: a group is `rollout + scoring` seconds in the making
and its weights `publish + pull` seconds on their way to the replica that makes it. So

    S = ceil(95th percentile of (rollout + scoring + publish + pull) / step)

batches ahead suffice. No clock of its own, and no I/O: the run tells it what it measured, and moves the bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from forge_async.core.errors import ConfigError

PERCENTILE = 0.95
KEEP_GROUPS, KEEP_SYNCS, KEEP_STEPS = 512, 8, 8
"""How many of the latest measurements count: few enough to follow a change within some steps."""

RAISE_AFTER, LOWER_AFTER = 2, 6
"""Steps in a row that must ask for a higher, or for a lower, S. Waiting costs time at once, age only a little."""

MARGIN = 0.25
"""How far below a whole number of steps the lag must lie before S falls to it: a lag at a boundary moves S once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundMove:
    """S is to change."""

    before: int
    """S so far, in steps."""
    max_staleness: int
    """S from now on, in steps."""
    why: str
    """One sentence for the log."""


class AutoStaleness:
    """Chooses S between the least that the other dials allow and the cap."""

    def __init__(self, *, begin: int, least: int, cap: int) -> None:
        """Args: S at the beginning, least legal S (`bound.least_staleness`) and `async.max_staleness_cap`, in steps."""
        if not least <= begin <= cap:
            raise ConfigError(f"S begins at {begin}, which is not between the least, {least}, and the cap, {cap}.")
        self.max_staleness = begin
        """S in force, in steps."""
        self._least, self._cap = least, cap
        self._groups_s: deque[float] = deque(maxlen=KEEP_GROUPS)
        self._syncs_s: deque[float] = deque(maxlen=KEEP_SYNCS)
        self._steps_s: deque[float] = deque(maxlen=KEEP_STEPS)
        self._num_above = self._num_below = 0

    def observe_group(self, rollout_s: float, scoring_s: float) -> None:
        """A group was made.

        Args:
            rollout_s: seconds that engines worked on it. Leave out the wait in the engine's queue: it grows with S
                when generation is the slowest stage, and S would chase it up to the cap for nothing.
            scoring_s: seconds from its last token to its last reward.
        """
        self._groups_s.append(rollout_s + scoring_s)

    def observe_sync(self, publish_s: float, pull_s: float) -> None:
        """A version travelled: seconds from the end of its step to readable, and from there to served by a replica."""
        self._syncs_s.append(publish_s + pull_s)

    def observe_step(self, step_s: float) -> BoundMove | None:
        """A step ended, `step_s` seconds after the one before, waits included. Returns the move that it calls for."""
        self._steps_s.append(step_s)
        ratio = self.lag_steps()
        if ratio is None:
            return None
        higher, lower = self._clamp(math.ceil(ratio)), self._clamp(math.ceil(ratio + MARGIN))
        self._num_above = self._num_above + 1 if higher > self.max_staleness else 0
        self._num_below = self._num_below + 1 if lower < self.max_staleness else 0
        if self._num_above >= RAISE_AFTER:
            return self._move(higher, ratio)
        if self._num_below >= LOWER_AFTER:
            return self._move(lower, ratio)
        return None

    def lag_steps(self) -> float | None:
        """The lag of groups and weights, in steps; None while something was not measured yet."""
        if not (self._groups_s and self._syncs_s and self._steps_s):
            return None
        step_s = _quantile(self._steps_s, 0.5)
        return self._lag_s() / step_s if step_s > 0 else None

    def _lag_s(self) -> float:
        return _quantile(self._groups_s, PERCENTILE) + _quantile(self._syncs_s, PERCENTILE)

    def _clamp(self, steps: int) -> int:
        return max(self._least, min(steps, self._cap))

    def _move(self, to: int, ratio: float) -> BoundMove:
        before, self.max_staleness = self.max_staleness, to
        self._num_above = self._num_below = 0
        capped = f", more than async.max_staleness_cap={self._cap} allows" if math.ceil(ratio) > self._cap else ""
        return BoundMove(
            before=before,
            max_staleness=to,
            why=(
                f"max_staleness moves from {before} to {to}: rollout, scoring, publish and pull take "
                f"{self._lag_s():.3g} s (95th percentile), {ratio:.2f} steps{capped}."
            ),
        )


def _quantile(values: Iterable[float], fraction: float) -> float:
    """The least value that so large a fraction of `values` does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
