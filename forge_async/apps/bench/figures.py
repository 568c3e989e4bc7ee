"""From the rows of finished runs to figures: stage times, the ideal step, idle and unaccounted time, CPU seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from forge_async.apps.bench.processes import CONTROL_PLANE, REWARD
from forge_async.apps.bench.runs import FinishedRun
from forge_async.core.errors import ForgeError
from forge_async.observe import names

Row = Mapping[str, Any]

DROPPED_STEPS = 3
"""First steps of a run that are left out: they allocate, and the ring is not full yet. Of the last ones S are left out,
since their batches were made before and nothing is generated beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Seconds a step that each stage of the ring is at work."""

    generate_s: float
    """Tg: the engine's steps, mean over the replicas."""
    score_s: float
    """Tr: rewards, mean over the rollout workers."""
    train_s: float
    """Tt: forward, backward, optimiser, and the copy of the parameters."""
    sync_s: float
    """Ts: publishing a version, fetching it and swapping it in."""

    @property
    def chain_s(self) -> float:
        """One batch's way round the ring."""
        return self.generate_s + self.score_s + self.train_s + self.sync_s

    def ideal_step_s(self, max_staleness: int) -> float:
        """Least seconds of a step: max(Tg, Tr, Tt, (Tg + Tr + Tt + Ts)/(S + 1)) (DESIGN.md, "Fraction of ideal")."""
        return max(self.generate_s, self.score_s, self.train_s, self.chain_s / (max_staleness + 1))


def steady_rows(run: FinishedRun) -> Sequence[Row]:
    """The rows of a run in which every stage had work. Raises ForgeError when there are none."""
    bound = run.summary["staleness/bound"]
    num_last = _num_ungenerated(run.rows) if bound is None else int(bound)
    rows = run.rows[DROPPED_STEPS : len(run.rows) - num_last]
    if not rows:
        raise ForgeError(
            f"{len(run.rows)} steps are too few: the first {DROPPED_STEPS} and the last {num_last} are left out; "
            "raise --steps."
        )
    return rows


def _num_ungenerated(rows: Sequence[Row]) -> int:
    """The last rows beside which nothing was generated: without a bound nothing else tells how many there are."""
    return next((number for number, row in enumerate(reversed(rows)) if row[names.TOKENS_GENERATED]), len(rows))


def stages_of(rows: Sequence[Row]) -> Stages:
    """Medians of each stage's seconds a step."""
    return Stages(
        generate_s=median(row[names.POLICY_BUSY] * row[names.STEP_S] for row in rows),
        score_s=median(row[names.REWARD_BUSY] * row[names.STEP_S] for row in rows),
        train_s=median(_busy_s(row) for row in rows),
        sync_s=median(row[names.WEIGHTS_PUBLISH_S] + row[names.WEIGHTS_PULL_S] for row in rows),
    )


def _busy_s(row: Row) -> float:
    return row[names.LEARNER_BUSY] * row[names.STEP_S]


def step_s_of(rows: Sequence[Row]) -> float:
    """Median seconds of a step."""
    return median(row[names.STEP_S] for row in rows)


def learner_idle_fraction(rows: Sequence[Row]) -> float:
    """Share of the time in which the learner did not train: 1 - busy seconds / all seconds."""
    return 1.0 - sum(map(_busy_s, rows)) / sum(row[names.STEP_S] for row in rows)


def unaccounted_fraction(rows: Sequence[Row]) -> float:
    """Share of the time in which the learner neither trained nor waited for a batch: what the loop itself costs."""
    known_s = sum(_busy_s(row) + row[names.LEARNER_WAIT_DATA_S] for row in rows)
    return max(0.0, 1.0 - known_s / sum(row[names.STEP_S] for row in rows))


def cpu_figures(runs: Sequence[FinishedRun], num_cores: int) -> dict[str, float]:
    """CPU seconds a step of each kind of process and of the control plane as a whole, and its share of all cores.

    Means over the steps that count, since the clock of /proc has ticks of 10 ms.
    """
    spent, wall_s, steps = dict[str, float](), 0.0, 0
    for run in runs:
        rows = steady_rows(run)
        start_s, end_s = (run.begun_s + row[names.TIME_S] for row in (run.rows[DROPPED_STEPS - 1], rows[-1]))
        wall_s, steps = wall_s + end_s - start_s, steps + len(rows)
        for role, cpu_s in run.cpu.between(start_s, end_s).items():
            spent[role] = spent.get(role, 0.0) + cpu_s
    control_s = sum(spent.get(role, 0.0) for role in CONTROL_PLANE)
    return {
        "cpu_s": sum(spent.values()) / steps,
        **{f"{role}_cpu_s": spent.get(role, 0.0) / steps for role in ("learner", "policy", REWARD, *CONTROL_PLANE)},
        "control_plane_cpu_s": control_s / steps,
        "control_plane_cpu_fraction": control_s / (num_cores * wall_s),
    }
