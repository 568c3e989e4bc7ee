"""`bench overlap`: what asynchrony gains on the real stack, against the best that the measured stages allow.

Each S, each way of swapping weights and each preset of the buffer runs in turn, round after round, on the default task.
The workload stays the same from step to step and from case to case: groups of equal rewards are trained on too, and the
learning rate is 0, so that the model answers as it did. At S = 0 the stages take turns, each alone on the machine and
given a whole batch: its times are those of the ideal. The simulated rows (simulated.py) stand beside: what the loops
reach where no stage shares its core.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from forge_async.apps.bench.figures import (
    DROPPED_STEPS,
    Stages,
    cpu_figures,
    learner_idle_fraction,
    stages_of,
    steady_rows,
    step_s_of,
    unaccounted_fraction,
)
from forge_async.apps.bench.kept_runs import KeptRuns
from forge_async.apps.bench.output import Report, num_cores
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.runs import FinishedRun
from forge_async.apps.bench.simulated import bound_of
from forge_async.apps.bench.simulated import measure as measure_simulated
from forge_async.observe import names
from forge_async.replay.settings import BUFFERS, SWAP_MODES, AsyncSettings

REAL_PARTS = ("bounds", "swaps", "buffers")
PARTS = ("real", *REAL_PARTS, "simulated")
"""What `--only` chooses from; `real` is the three of them."""
BOUNDS = (0, 1, 2, 4)
"""S of the part `bounds`."""
SWAPPED_AT = 2
"""S at which the ways of swapping are compared."""
SHORT_STEPS = DROPPED_STEPS + 15 + SWAPPED_AT
"""Most steps of a run of the parts `swaps` and `buffers`, of which 15 count."""
SAME_WORK = ("advantage.zero_variance=keep", "optimizer.lr=0")
"""Keeps a step's work the same however long it runs."""
BALANCED = (0.8, 1.25)
"""Tg/Tt within which the fraction of ideal is quoted."""
BASELINE_LIMIT = 1.1
"""How much longer than the sum of its stages a synchronous step may take for the comparison to be fair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting of the dials."""

    name: str
    """`S=2/keep_kv` or `buffer=double/keep_kv`."""
    dials: AsyncSettings
    most_steps: int | None = None
    """Learner steps of its runs, where the plan has more; None: as the plan says."""

    def words(self, num_steps: int) -> tuple[str, ...]:
        """What it adds to a run's command line; `num_steps` are the plan's."""
        dials, num_steps = self.dials, min(num_steps, self.most_steps or num_steps)
        bound = (f"async.max_staleness={dials.max_staleness}",) if dials.buffer == "bounded" else ()
        return (f"async.buffer={dials.buffer}", *bound, f"async.swap={dials.swap}", f"steps={num_steps}")


def cases(part: str, swap: str) -> list[Case]:
    """The cases of a part; the synchronous one, which the others are compared with, comes first.

    `swap` is that of the cases that do not name another.
    """
    short = None if part == "bounds" else SHORT_STEPS
    if part == "buffers":
        dials = {f"buffer={buffer}/{swap}": AsyncSettings(buffer=buffer, swap=swap) for buffer in BUFFERS}
    else:
        pairs = [(bound, swap) for bound in BOUNDS] if part == "bounds" else [(SWAPPED_AT, mode) for mode in SWAP_MODES]
        dials = {f"S={bound}/{mode}": AsyncSettings(max_staleness=bound, swap=mode) for bound, mode in pairs}
    synchronous = {f"S=0/{swap}": AsyncSettings(max_staleness=0, swap=swap)}
    return [Case(name=name, dials=of, most_steps=short) for name, of in (synchronous | dials).items()]


def measure(plan: Plan) -> Report:
    """Run the real cases, then the simulated ones, or those that `plan.only` names."""
    reports = []
    if plan.only != "simulated":
        reports.append(real(plan))
    if plan.only in ("", "simulated"):
        rows, notes = measure_simulated()
        reports.append(Report(bench="overlap", rows=rows, notes=notes))
    return Report(
        bench="overlap",
        rows=[row for report in reports for row in report.rows],
        notes=[note for report in reports for note in report.notes],
    )


def real(plan: Plan) -> Report:
    """Run the cases on the real stack, interleaved; those that are in the file of finished runs are not run again."""
    parts = (plan.only,) if plan.only in REAL_PARTS else REAL_PARTS
    wanted: dict[str, Case] = {}
    for case in (case for part in parts for case in cases(part, plan.config.asynchrony.swap)):
        wanted.setdefault(case.name, case)
    model = plan.model_folder()
    kept = KeptRuns(plan.out or plan.folder / "runs.json", model)
    runs: dict[str, list[FinishedRun]] = {name: [] for name in wanted}
    for number in range(plan.rounds):
        for name, case in wanted.items():
            print(f"round {number + 1}/{plan.rounds}: {name}", flush=True)
            words = (*plan.words, f"model.path={model}", *SAME_WORK, *case.words(plan.steps))
            runs[name].append(kept.run(words, number, plan.folder / f"{name.replace('/', '-')}-{number}"))
    return report({wanted[name]: of_case for name, of_case in runs.items()}, kept.notes)


def report(runs: Mapping[Case, Sequence[FinishedRun]], more_notes: Sequence[str] = ()) -> Report:
    """Figures of finished runs by case, the synchronous one first."""
    rows = {case: [row for run in of_case for row in steady_rows(run)] for case, of_case in runs.items()}
    synchronous = next(iter(rows))
    alone, baseline_s = stages_of(rows[synchronous]), step_s_of(rows[synchronous])
    table = []
    for case, of_case in runs.items():
        own = case_figures(rows[case], bound_of(case.dials), alone, baseline_s)
        cpu = cpu_figures(of_case, num_cores())
        busy = cpu["cpu_s"] / (num_cores() * fmean(row[names.STEP_S] for row in rows[case]))
        table.append({"case": f"real/{case.name}", **own, **cpu, "cores_busy_fraction": busy})
    balance, excess = alone.generate_s / alone.train_s, baseline_s / alone.chain_s
    table[0] |= {"generate_over_train": balance, "step_over_chain": excess}
    return Report(bench="overlap", rows=table, notes=[*notes(balance, excess), *more_notes])


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
        "staleness_max": max(row[names.STALENESS_MAX] for row in rows),
        "staleness_mean": fmean(row[names.STALENESS_MEAN] for row in rows),
        "pause_s": fmean(row[names.WEIGHTS_PAUSE_S] for row in rows),
        "discarded_tokens": fmean(row[names.DISCARDED_TOKENS] for row in rows),
        "recomputed_tokens": fmean(row[names.RECOMPUTED_TOKENS] for row in rows),
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
