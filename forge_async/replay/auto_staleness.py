"""`async.max_staleness=auto`: the least S under which no stage waits for another, from what a run measures.

While one batch is trained, the next ones must be on their way: a group is `rollout + scoring` seconds in the making
and its weights `publish + pull` seconds on their way to the replica that makes it. So

    S = ceil(95th percentile of (rollout + scoring + publish + pull) / step)

batches ahead suffice. It rises only while the learner waits for batches, and a rise that has not shortened the steps
is taken back: where generation is the slowest stage, a group takes the longer the more of them are under way, and S
would chase that up to the cap for nothing. No clock of its own, and no I/O: the run tells it what it measured, and
moves the bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge_async.core.errors import ConfigError
from forge_async.replay.bound import least_staleness
from forge_async.replay.lanes import Lanes
from forge_async.replay.settings import AUTO, AsyncSettings

PERCENTILE = 0.95
KEEP_GROUPS, KEEP_SYNCS, KEEP_STEPS = 512, 8, 8
"""How many of the latest measurements count: few enough to follow a change within some steps."""

RAISE_AFTER, LOWER_AFTER = 2, 6
"""Steps in a row that must ask for a higher, or for a lower, S. Waiting costs time at once, age only a little."""

WAITING = 0.05
"""Share of the steps in which the learner must wait for S to rise: more age cannot help one that never waits."""
TRIAL_STEPS = 8
"""Steps after a rise by which it is judged."""
GAIN = 0.03
"""By how much the steps must be shorter then."""
WORSE_SYNC = 1.25
"""How much longer than at a rise that was taken back a version must travel before S may rise there again."""

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


@dataclass(slots=True, kw_only=True)
class _Trial:
    """A rise that is being judged."""

    before: int
    """S before it, in steps."""
    step_s: float
    """The shorter ones of the steps that called for it, in seconds."""
    since_s: list[float] = field(default_factory=list)
    """Steps since, in seconds."""


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
        self._waits_s: deque[float] = deque(maxlen=KEEP_STEPS)
        self._num_above = self._num_below = 0
        self._trial: _Trial | None = None
        self._ceiling: tuple[int, float] | None = None
        """(S above which a rise did not pay, what a version's travel took then), in steps and seconds."""

    @classmethod
    def of(cls, settings: AsyncSettings, groups_per_step: int) -> AutoStaleness | None:
        """The controller that the dials ask for; None when S is given."""
        if settings.max_staleness != AUTO or settings.buffer != "bounded":
            return None
        bound = Lanes.of(settings, groups_per_step).normal.bound
        least = least_staleness(bound.window, bound.groups_per_step, bound.publish_every)
        return cls(begin=bound.max_staleness, least=least, cap=settings.max_staleness_cap)

    def observe_group(self, rollout_s: float, scoring_s: float) -> None:
        """A group was made.

        Args:
            rollout_s: seconds from its admission to its last token.
            scoring_s: seconds from its last token to its last reward.
        """
        self._groups_s.append(rollout_s + scoring_s)

    def observe_sync(self, publish_s: float, pull_s: float) -> None:
        """A version travelled: seconds from the end of its step to readable, and from there to served by a replica."""
        self._syncs_s.append(publish_s + pull_s)

    def observe_step(self, step_s: float, wait_s: float) -> BoundMove | None:
        """A step ended. Returns the move that it calls for.

        Args:
            step_s: seconds since the step before it ended, waits included.
            wait_s: seconds of these in which the learner waited for its batch.
        """
        self._steps_s.append(step_s)
        self._waits_s.append(wait_s)
        ratio = self.lag_steps()
        if ratio is None:
            return None
        if self._trial is not None and (move := self._judge(self._trial, step_s)):
            return move
        higher, lower = self._clamp(math.ceil(ratio)), self._clamp(math.ceil(ratio + MARGIN))
        wanted = higher > self.max_staleness and self._waits() and not self._failed_before(higher)
        rises = wanted and self._trial is None
        self._num_above = self._num_above + 1 if rises else 0
        self._num_below = self._num_below + 1 if lower < self.max_staleness else 0
        if self._num_above >= RAISE_AFTER:
            self._trial = _Trial(before=self.max_staleness, step_s=min(list(self._steps_s)[-RAISE_AFTER:]))
            return self._move(higher, f"take {self._lag_s():.3g} s (95th percentile), {ratio:.2f} steps")
        if self._num_below >= LOWER_AFTER:
            return self._move(lower, f"take {self._lag_s():.3g} s (95th percentile), {ratio:.2f} steps")
        return None

    def _judge(self, trial: _Trial, step_s: float) -> BoundMove | None:
        """Take a rise back when the steps since have not become shorter."""
        trial.since_s.append(step_s)
        if len(trial.since_s) < TRIAL_STEPS:
            return None
        self._trial, now_s = None, _quantile(trial.since_s, 0.5)
        if now_s <= (1.0 - GAIN) * trial.step_s or self.max_staleness <= trial.before:
            return None
        self._ceiling = trial.before, _quantile(self._syncs_s, PERCENTILE)
        return self._move(
            trial.before,
            f"are no bottleneck: steps took {trial.step_s:.3g} s before the rise and {now_s:.3g} s after it",
        )

    def _waits(self) -> bool:
        return sum(self._waits_s) > WAITING * sum(self._steps_s)

    def _failed_before(self, steps: int) -> bool:
        if self._ceiling is None:
            return False
        most, sync_s = self._ceiling
        return steps > most and _quantile(self._syncs_s, PERCENTILE) <= WORSE_SYNC * sync_s

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

    def _move(self, to: int, what: str) -> BoundMove:
        before, self.max_staleness = self.max_staleness, to
        self._num_above = self._num_below = 0
        capped = to == self._cap and to > before and math.ceil(self.lag_steps() or 0.0) > to
        limit = f", more than async.max_staleness_cap={self._cap} allows" if capped else ""
        return BoundMove(
            before=before,
            max_staleness=to,
            why=f"max_staleness moves from {before} to {to}: rollout, scoring, publish and pull {what}{limit}.",
        )


def _quantile(values: Iterable[float], fraction: float) -> float:
    """The least value that so large a fraction of `values` does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
