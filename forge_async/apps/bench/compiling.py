"""`bench compile`: what `learner.compile` and `policy.compile` gain by batch size, and after how many steps they pay.

`learner/tokens=N` is a learner's step on N tokens, `policy/tokens=N` an engine's step that makes N tokens, one for each
of N sequences. Eager and compiled take turns. What compiling costs is the time from nothing to steady steps, less that
of eager: nothing is taken from a cache, for each of the learner's sizes anew; an engine compiles once for all sizes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.apps.bench.engine_runs import Cost, build_engine, clocked, run_engine
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.packing import samples_of
from forge_async.apps.bench.plan import Plan, in_another_process
from forge_async.backends.only_rank import be_the_only_rank
from forge_async.config import Config
from forge_async.learner.batch import split_samples
from forge_async.learner.layout import Layout
from forge_async.learner.settings import OptimizerSettings

if TYPE_CHECKING:
    from forge_async.backends.titan_learner import TitanLearner

PARTS = ("learner", "policy")
CASES = {"eager": False, "compiled": True}
LEARNER_TOKENS = (256, 2048, 16_384)
SAMPLE_TOKENS = 32
POLICY_TOKENS = (1, 16, 256)
WARM_STEPS = 3
"""Steps of the learner, and runs of an engine, until shapes are known and nothing is compiled any more."""
WITHOUT_CACHES = {
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # so that what compiling costs is seen in this process's CPU seconds
}


@dataclass(frozen=True, slots=True)
class Timing:
    """One case at one size."""

    warm: Cost
    """From nothing until the steps are steady."""
    steps: Sequence[Cost]
    """Steady ones."""


def measure(plan: Plan) -> Report:
    """Time both parts, each in processes of its own."""
    folder, rows = plan.model_folder(), []
    if plan.only in ("", "learner"):
        rows += in_another_process(_learner_rows, folder, plan.config, plan.rounds)
    if plan.only in ("", "policy"):
        rows += _policy_rows(folder, plan.config, plan.rounds)
    return Report(bench="compile", rows=rows, notes=[_told(row) for row in rows])


def row_of(case: str, eager: Timing, compiled: Timing) -> dict[str, Any]:
    """Medians of steps, what compiling gains, costs, and after how many steps it pays.

    That is left out where compiled steps gain nothing, and where eager took as long to become steady: the cost was then
    too small for this machine to show.
    """
    row: dict[str, Any] = {"case": case}
    for unit in ("wall", "cpu"):
        plain, fast = (median(getattr(cost, f"{unit}_s") for cost in each.steps) for each in (eager, compiled))
        extra = max(getattr(compiled.warm, f"{unit}_s") - getattr(eager.warm, f"{unit}_s"), 0.0)
        suffix = "" if unit == "wall" else "_cpu"
        row |= {
            f"eager_step{suffix}_s": plain,
            f"compiled_step{suffix}_s": fast,
            f"speedup{suffix}": plain / fast,
            f"compile{suffix}_s": extra,
        }
        if plain > fast and extra > 0:
            row[f"break_even{suffix}_steps"] = math.ceil(extra / (plain - fast))
    return row


def _told(row: dict[str, Any]) -> str:
    if row["speedup"] <= 1:
        pays = "never pays"
    elif "break_even_steps" in row:
        pays = f"pays after {row['break_even_steps']:,} steps"
    else:
        pays = "this machine was too noisy to time; see the CPU seconds"
    return (
        f"{row['case']}: {row['speedup']:.2f} times the rate for {row['compile_s']:.0f} s of compiling, which {pays}."
    )


def _total(costs: Sequence[Cost]) -> Cost:
    return sum(costs, Cost(0.0, 0.0))


def _learner_rows(folder: Path, config: Config, rounds: int) -> list[dict[str, Any]]:
    os.environ |= WITHOUT_CACHES
    import torch

    learners, rows = {case: _learner(folder, config, compiles) for case, compiles in CASES.items()}, []
    for tokens in LEARNER_TOKENS:
        torch.compiler.reset()
        steps = {case: _learner_step(learner, config, tokens) for case, learner in learners.items()}
        rows.append(_in_turn(f"learner/tokens={tokens}", steps, rounds))
    return rows


def _in_turn(case: str, steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    warm: dict[str, list[Cost]] = {name: [] for name in steps}
    timed: dict[str, list[Cost]] = {name: [] for name in steps}
    for found, count in ((warm, WARM_STEPS), (timed, rounds)):
        for _ in range(count):
            for name, step in steps.items():
                with clocked(found[name]):
                    step()
    return row_of(case, *(Timing(_total(warm[name]), timed[name]) for name in CASES))


def _learner_step(learner: TitanLearner, config: Config, tokens: int) -> Callable[[], Any]:
    lengths = np.full(max(tokens // SAMPLE_TOKENS, 1), SAMPLE_TOKENS, np.int32)
    share = split_samples(samples_of(lengths, config.root.seed), 1, Layout.of(config.learner))[0]
    return lambda: learner.train(share)


def _learner(folder: Path, config: Config, compiles: bool) -> TitanLearner:
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss

    be_the_only_rank()
    return TitanLearner(
        folder,
        loss=objective_loss(config.whole_objective(), config.asynchrony.correction, config.correction),
        learner=replace(config.learner, ranks=1, compile=compiles),
        optimizer=OptimizerSettings(lr=0.0),  # the same numbers in every step
        total_steps=100,
        seed=config.root.seed,
    )


def _build_engine(folder: Path, config: Config, compiles: bool) -> Cost:
    os.environ |= WITHOUT_CACHES
    return build_engine(folder, replace(config.policy, compile=compiles, tensor_parallel=1))


def _policy_rows(folder: Path, config: Config, rounds: int) -> list[dict[str, Any]]:
    """A process for each engine, since what vLLM compiles is a matter of the process; one works at a time."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {case: stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for case in CASES}
        warm = {case: pool.submit(_build_engine, folder, config, CASES[case]).result() for case, pool in pools.items()}
        for case, pool in pools.items():
            for tokens in POLICY_TOKENS * WARM_STEPS:
                warm[case] += pool.submit(run_engine, tokens).result()[0]
        rows = []
        for tokens in POLICY_TOKENS:
            timed: dict[str, list[Cost]] = {case: [] for case in CASES}
            for _ in range(rounds):
                for case, pool in pools.items():
                    cost, num_steps = pool.submit(run_engine, tokens).result()
                    timed[case].append(cost.over(num_steps))
            rows.append(row_of(f"policy/tokens={tokens}", *(Timing(warm[case], timed[case]) for case in CASES)))
        return rows
