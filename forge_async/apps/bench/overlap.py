"""`bench overlap`: what asynchrony gains on the real stack, against the best that the measured stages allow.

S = 0, 1 and 2 run in turn, round after round, on the default task. The workload stays the same from step to step and
from case to case: groups of equal rewards are trained on too, and the learning rate is 0, so that the model answers as
it did. At S = 0 the stages take turns, each alone on the machine and given a whole batch: its times are those of the
ideal. The simulated rows (simulated.py) stand beside: what the loops reach where no stage shares its core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_async.apps.bench.figures import (
    Stages,
    cpu_figures,
    learner_idle_fraction,
    stages_of,
    steady_rows,
    step_s_of,
    unaccounted_fraction,
)
from forge_async.apps.bench.output import Report, num_cores
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.runs import FinishedRun, run_grpo
from forge_async.apps.bench.simulated import measure as measure_simulated

BOUNDS = (0, 1, 2)
"""S of the cases."""
SAME_WORK = ("advantage.zero_variance=keep", "optimizer.lr=0")
"""Keeps a step's work the same however long it runs."""
BALANCED = (0.8, 1.25)
"""Tg/Tt within which the fraction of ideal is quoted."""
BASELINE_LIMIT = 1.1
"""How much longer than the sum of its stages a synchronous step may take for the comparison to be fair."""


def measure(plan: Plan) -> Report:
    """Run the real cases, then the simulated ones, or those that `plan.only` names."""
    parts = [
        part() for name, part in (("real", lambda: real(plan)), ("simulated", simulated)) if plan.only in ("", name)
    ]
    return Report(
        bench="overlap",
        rows=[row for part in parts for row in part.rows],
        notes=[note for part in parts for note in part.notes],
    )


def simulated() -> Report:
    """The simulated rows."""
    rows, notes = measure_simulated()
    return Report(bench="overlap", rows=rows, notes=notes)


def real(plan: Plan) -> Report:
    """Run the cases on the real stack, interleaved."""
    model = plan.model_folder()
    runs: dict[int, list[FinishedRun]] = {bound: [] for bound in BOUNDS}
    for number in range(plan.rounds):
        for bound in BOUNDS:
            print(f"round {number + 1}/{plan.rounds}: S={bound}", flush=True)
            words = (*plan.words, f"model.path={model}", *SAME_WORK, *case_words(bound, plan.steps))
            runs[bound].append(run_grpo(words, plan.folder / f"S{bound}-{number}"))
    return report(runs, swap=plan.config.asynchrony.swap)


def case_words(bound: int, steps: int) -> tuple[str, ...]:
    """The dials of a case."""
    return ("async.buffer=bounded", f"async.max_staleness={bound}", f"steps={steps}")


def report(runs: Mapping[int, Sequence[FinishedRun]], swap: str) -> Report:
    """Figures of finished runs by S, which has 0."""
    rows = {bound: [row for run in of_case for row in steady_rows(run)] for bound, of_case in runs.items()}
    alone, baseline_s = stages_of(rows[0]), step_s_of(rows[0])
    table = []
    for bound, of_case in runs.items():
        own = case_figures(rows[bound], bound, alone, baseline_s)
        table.append({"case": f"real/S={bound}/{swap}", **own, **cpu_figures(of_case, num_cores())})
    balance, excess = alone.generate_s / alone.train_s, baseline_s / alone.chain_s
    table[list(runs).index(0)] |= {"generate_over_train": balance, "step_over_chain": excess}
    return Report(bench="overlap", rows=table, notes=notes(balance, excess))


def case_figures(rows: Sequence[Mapping[str, Any]], bound: int, alone: Stages, baseline_s: float) -> dict[str, float]:
    """Figures of one case; its stage times are those in this very case, the ideal's are `alone`."""
    step_s, stages, ideal_s = step_s_of(rows), stages_of(rows), alone.ideal_step_s(bound)
    return {
        "step_s": step_s,
        "generate_s": stages.generate_s,
        "score_s": stages.score_s,
        "train_s": stages.train_s,
        "sync_s": stages.sync_s,
        "ideal_step_s": ideal_s,
        "fraction_of_ideal": ideal_s / step_s,
        "speedup_measured": baseline_s / step_s,
        "learner_idle_fraction": learner_idle_fraction(rows),
        "unaccounted_fraction": unaccounted_fraction(rows),
    }


def notes(balance: float, excess: float) -> list[str]:
    """Where the stage times come from, and whether the two conditions of the fraction of ideal hold."""
    low, high = BALANCED
    return [
        "The ideal's stage times are medians of the S=0 case, where stages take turns: each alone, a batch at once.",
        f"Tg/Tt is {balance:.2f}, {'within' if low <= balance <= high else 'OUTSIDE'} {low}..{high}"
        f"{'' if low <= balance <= high else ': the fraction of ideal is not to be quoted from this workload'}.",
        f"The synchronous step is {excess:.2f} times Tg+Tr+Tt+Ts, "
        f"{'within' if excess <= BASELINE_LIMIT else 'OUTSIDE'} {BASELINE_LIMIT}"
        f"{'' if excess <= BASELINE_LIMIT else ': part of the speed-up is a baseline that is slower than it need be'}.",
    ]
