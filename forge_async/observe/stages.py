"""Which stage of the ring is the slowest, and how far a step is from the ideal one.

Stage times come from a row's `stage/*` names where present, else from busy fractions and the step's time. They are
measured while the stages share the machine; `bench overlap` measures them alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from forge_async.observe import names

_REMEDIES = {
    "generation": "add policy replicas (policy.replicas) or shorten completions (sampling.max_new_tokens)",
    "scoring": "add reward workers (rollout.reward_workers), make the reward function cheaper, or add ranks to a "
    "reference service (reference.ranks)",
    "training": "add learner ranks (learner.ranks) or train on fewer tokens a step",
    "weights": "publish less often (async.publish_every) or take a faster way (weights.transport)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds a step that each stage of the ring was at work."""

    generation: float = 0.0
    scoring: float = 0.0
    training: float = 0.0
    weights: float = 0.0

    def slowest(self) -> str | None:
        """Name of the stage that takes longest; None when none took any time."""
        times: dict[str, float] = asdict(self)
        name = max(times, key=times.__getitem__)
        return name if times[name] > 0 else None

    def ideal_step_s(self, max_staleness: int | None) -> float:
        """Least seconds a step can take: the slowest stage, or the chain spread over S + 1 batches in flight.

        With None (no bound) only the slowest stage counts.
        """
        times = asdict(self).values()
        chain_s = 0.0 if max_staleness is None else sum(times) / (max_staleness + 1)
        return max(*times, chain_s)


def step_seconds(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Wall time of each row's step: its `step_s`, else the time since the row of the step before."""
    return [_step_s(row, rows[at - 1] if at else None) for at, row in enumerate(rows)]


def _step_s(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> float | None:
    own, now, then = number(row, names.STEP_S), number(row, names.TIME_S), number(before or {}, names.TIME_S)
    if own is not None or now is None or then is None:
        return own
    return now - then if now > then else None


def stage_times(row: Mapping[str, Any], step_s: float | None) -> StageTimes:
    """The stages of one row; a stage that the row says nothing of takes 0."""
    moved = (number(row, names.WEIGHTS_PUBLISH_S) or 0.0) + (number(row, names.WEIGHTS_PULL_S) or 0.0)
    return StageTimes(
        generation=_stage(row, names.STAGE_GENERATION_S, names.POLICY_BUSY, step_s),
        # A worker waits for rewards, then for the reference service.
        scoring=_stage(row, names.STAGE_SCORING_S, names.REWARD_BUSY, step_s)
        + _busy(row, names.REFERENCE_BUSY, step_s),
        training=_stage(row, names.STAGE_TRAINING_S, names.LEARNER_BUSY, step_s),
        weights=_first_known(number(row, names.STAGE_WEIGHTS_S), moved),
    )


def _stage(row: Mapping[str, Any], own: str, busy_fraction: str, step_s: float | None) -> float:
    return _first_known(number(row, own), _busy(row, busy_fraction, step_s))


def _busy(row: Mapping[str, Any], busy_fraction: str, step_s: float | None) -> float:
    return (number(row, busy_fraction) or 0.0) * (step_s or 0.0)


def _first_known(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def median_stage_times(rows: Sequence[Mapping[str, Any]]) -> StageTimes:
    """Median over the steps of each stage's seconds, the first step left out when there are others."""
    every = [stage_times(row, step_s) for row, step_s in zip(rows, step_seconds(rows), strict=True)]
    steady = every[1:] or every
    if not steady:
        return StageTimes()
    return StageTimes(
        generation=median(times.generation for times in steady),
        scoring=median(times.scoring for times in steady),
        training=median(times.training for times in steady),
        weights=median(times.weights for times in steady),
    )


def median_step_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Median seconds of a step, the first step left out when there are others; None when no step is timed."""
    every = step_seconds(rows)
    steady = [step_s for step_s in every[1:] or every if step_s is not None]
    return median(steady) if steady else None


def advice(times: StageTimes, max_staleness: int | None) -> str:
    """One line on what would make steps shorter; "" when nothing is known."""
    slowest = times.slowest()
    if slowest is None:
        return ""
    chain = times.ideal_step_s(max_staleness) > getattr(times, slowest) * 1.1
    if chain and max_staleness == 0:
        return f"stages take turns at async.max_staleness=0, {slowest} is the slowest: 1 or more lets them overlap."
    if chain:
        return (
            f"{slowest} is the slowest stage, but a batch's way round takes longer than {max_staleness} + 1 steps of "
            "it: raise async.max_staleness."
        )
    return f"{slowest} is the slowest stage: {_REMEDIES[slowest]}."


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A row's number as a float; None when it is absent, null or not finite."""
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None
