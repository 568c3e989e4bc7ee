"""`bench start`: from the start of the process to each part ready, the first rollout and the first learner step.

Each run takes one step and ends. `cold` comes first: an empty VLLM_CACHE_ROOT and, where this user may, an empty page
cache. `warm` are the medians of runs after it. Times count from the start of the process, the interpreter included.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.runs import FinishedRun, run_grpo
from forge_async.core.errors import ForgeError
from forge_async.observe import names

DROP_CACHES = Path("/proc/sys/vm/drop_caches")
AIMS_S = {"warm": 30.0, "cold": 60.0}
"""Seconds to the first learner step on two cores."""


def measure(plan: Plan) -> Report:
    """Run the cold start, then the warm ones."""
    model = plan.model_folder()
    words = (*plan.words, f"model.path={model}", "steps=1")
    rows, notes = [], []
    if plan.cold:
        dropped = drop_page_cache()
        print("cold", flush=True)
        run = run_grpo(words, plan.folder / "cold", {"VLLM_CACHE_ROOT": str(plan.folder / "vllm-cache")})
        rows.append({"case": "cold", **start_figures(run)})
        notes.append(
            f"cold: VLLM_CACHE_ROOT was empty, the page cache {'too' if dropped else 'was NOT (not allowed)'}."
        )
    runs = []
    for number in range(plan.rounds):
        print(f"warm {number + 1}/{plan.rounds}", flush=True)
        runs.append(run_grpo(words, plan.folder / f"warm-{number}"))
    rows.insert(0, {"case": "warm", **medians([start_figures(run) for run in runs])})
    return Report(bench="start", rows=rows, notes=[*notes, *(aim_note(row) for row in rows)])


def drop_page_cache() -> bool:
    """Have the kernel forget what it holds of files; False where this user may not."""
    os.sync()
    try:
        DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def start_figures(run: FinishedRun) -> dict[str, float]:
    """Seconds from the start of the process to each phase of one run, and the CPU seconds of all its processes."""
    generated = [event["generated_s"] for event in run.events if event["generated_s"] is not None]
    if not generated or not run.rows:
        raise ForgeError(f"The run that began at {run.begun_s:.0f} has no finished rollout or step to time.")
    phases = {
        name.removeprefix("startup/"): run.head_s + float(value)
        for name, value in run.summary.items()
        if name.startswith("startup/")
    }
    return {
        "program_s": run.head_s,
        **dict(sorted(phases.items(), key=lambda item: item[1])),
        "ready_s": run.head_s + float(run.summary["startup_s"]),
        "first_rollout_s": run.head_s + min(generated),
        "first_step_s": run.head_s + float(run.rows[0][names.TIME_S]),
        "ended_s": run.ended_s - run.spawned_s,
        "cpu_s": sum(run.cpu.readings[-1].values()) if run.cpu.readings else 0.0,
    }


def medians(of_runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure that every run has."""
    common = [name for name in of_runs[0] if all(name in figures for figures in of_runs)]
    return {"runs": len(of_runs), **{name: median(figures[name] for figures in of_runs) for name in common}}


def aim_note(row: dict) -> str:
    """How the first step stands to its aim."""
    aim_s = AIMS_S[row["case"]]
    return f"{row['case']}: first step after {row['first_step_s']:.1f} s (aim on two cores: {aim_s:g} s)."
