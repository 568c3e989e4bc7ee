"""`bench swaps`: what each way of swapping weights costs, and what it does to learning, on the real stack.

One training run for each mode of `async.swap`, in turn, round after round, with the same seed and S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from forge_async.apps.bench.figures import DROPPED_STEPS
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.runs import FinishedRun, run_grpo
from forge_async.observe import names
from forge_async.replay.settings import SWAP_MODES

LAST_STEPS = 10
"""Steps that `reward_last` is the mean of."""

Row = Mapping[str, Any]


def measure(plan: Plan) -> Report:
    """Run every mode `plan.rounds` times, with seeds 0, 1, 2 ..."""
    model = plan.model_folder()
    runs: dict[str, list[FinishedRun]] = {mode: [] for mode in SWAP_MODES}
    for number in range(plan.rounds):
        for mode in SWAP_MODES:
            print(f"round {number + 1}/{plan.rounds}: {mode}", flush=True)
            dials = (f"async.swap={mode}", f"steps={plan.steps}", f"seed={number}")
            words = (*plan.words, f"model.path={model}", *dials)
            runs[mode].append(run_grpo(words, plan.folder / f"{mode}-{number}"))
    staleness = plan.config.asynchrony.highest_staleness
    table = [
        {
            "case": f"real/S={'none' if staleness is None else staleness}/{mode}",
            **figures([run.rows for run in of_mode]),
        }
        for mode, of_mode in runs.items()
    ]
    return Report(bench="swaps", rows=table)


def figures(runs: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Figures of one mode, over all steps of its runs but the first, in which the ring is not full yet."""
    steady = [row for rows in runs for row in rows[DROPPED_STEPS:]]
    generated = sum(row[names.TOKENS_GENERATED] for row in steady)
    return {
        "step_s": median(row[names.STEP_S] for row in steady),
        "pause_s": fmean(row[names.WEIGHTS_PAUSE_S] for row in steady),
        "lag_s": median(row[names.WEIGHTS_LAG_S] for row in steady),
        "discarded_tokens": fmean(row[names.DISCARDED_TOKENS] for row in steady),
        "recomputed_tokens": fmean(row[names.RECOMPUTED_TOKENS] for row in steady),
        "generated_tokens": generated / len(steady),
        "staleness_mean": fmean(row[names.STALENESS_MEAN] for row in steady),
        "staleness_max": max(row[names.STALENESS_MAX] for row in steady),
        "clip_fraction": fmean(row[names.CLIP_FRACTION] for row in steady),
        "reward_last": fmean(row[names.REWARD_MEAN] for rows in runs for row in rows[-LAST_STEPS:]),
    }
