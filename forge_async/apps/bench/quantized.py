"""`bench quantize`: what `policy.quantize` gains by batch size, what a load then costs, and how far off it is.

`tokens=N` is an engine's step that makes N tokens, one for each of N sequences; the engines take turns. `load` is a
version's way into the engine: quantised beside its steps, then exchanged between two of them. `gap` is how far a token
of the probe's text is from the plain engine's log-probability, on average.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from forge_async.apps.bench.engine_runs import Cost, build_engine, load_engine, run_engine, score_with_engine
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan, in_another_process
from forge_async.config.schema import MOST_PROBE_TOKENS

PLAIN = "none"
TOKENS = (1, 16, 64)
WARM_RUNS = 2


def measure(plan: Plan) -> Report:
    """Time a plain engine beside one that is quantised as `policy.quantize` says, or in int8 where it says nothing."""
    folder, policy = plan.model_folder(), replace(plan.config.policy, tensor_parallel=1)
    formats = (PLAIN, policy.quantize if policy.quantize != PLAIN else "int8")
    probe = in_another_process(_probe_ids, folder, min(MOST_PROBE_TOKENS, policy.max_model_tokens - 1))
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pools = {each: stack.enter_context(ProcessPoolExecutor(1, mp_context=context)) for each in formats}
        for quantize, pool in pools.items():
            pool.submit(build_engine, folder, replace(policy, quantize=quantize)).result()
        loads: dict[str, list[tuple[float, float]]] = {each: [] for each in formats}
        for step in range(1, plan.rounds + 2):
            for quantize, pool in pools.items():
                loads[quantize].append(pool.submit(_load, folder, policy.dtype, step).result())
        scored = {each: pool.submit(score_with_engine, probe).result() for each, pool in pools.items()}
        steps: dict[str, dict[int, list[Cost]]] = {each: {tokens: [] for tokens in TOKENS} for each in formats}
        for number in range(WARM_RUNS + plan.rounds):
            for tokens in TOKENS:
                for quantize, pool in pools.items():
                    cost, num_steps = pool.submit(run_engine, tokens).result()
                    if number >= WARM_RUNS:
                        steps[quantize][tokens].append(cost.over(num_steps))
    return report(formats, steps, {each: found[1:] for each, found in loads.items()}, scored)


def report(
    formats: tuple[str, str],
    steps: Mapping[str, Mapping[int, Sequence[Cost]]],
    loads: Mapping[str, Sequence[tuple[float, float]]],
    scored: Mapping[str, np.ndarray],
) -> Report:
    """Medians side by side.

    Args:
        formats: the plain one and the other.
        steps: what an engine's steps took, by format and by tokens that each makes.
        loads: seconds beside and between the engine's steps, by format.
        scored: float32 [T - 1], log-probabilities of the same text, by format.
    """
    plain, other = formats
    rows: list[dict[str, Any]] = []
    for tokens in steps[plain]:
        row: dict[str, Any] = {"case": f"tokens={tokens}"}
        for unit in ("wall", "cpu"):
            by_format = {each: median(getattr(cost, f"{unit}_s") for cost in steps[each][tokens]) for each in formats}
            suffix = "" if unit == "wall" else "_cpu"
            row |= {f"{each}_step{suffix}_ms": 1e3 * found for each, found in by_format.items()}
            row[f"speedup{suffix}"] = by_format[plain] / by_format[other]
        rows.append(row)
    for each in formats:
        beside, between = (1e3 * median(load[part] for load in loads[each]) for part in (0, 1))
        rows.append({"case": f"load/{each}", "beside_ms": beside, "pause_ms": between})
    gaps = np.abs(scored[other] - scored[plain])
    rows.append({"case": f"gap/{other}", "mean_nats": float(gaps.mean()), "max_nats": float(gaps.max())})
    return Report(bench="quantize", rows=rows, notes=["speedup: the plain engine's step over the quantised one's."])


def _load(folder: Path, dtype: str, step: int) -> tuple[float, float]:
    import torch
    from safetensors.torch import load_file

    weights = {
        name: tensor.to(getattr(torch, dtype), copy=True)  # out of the file, of which pages would be read in the pause
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return load_engine(weights, step)


def _probe_ids(folder: Path, max_tokens: int) -> list[int]:
    from forge_async.backends.parity import probe_ids

    return probe_ids(folder, max_tokens).tolist()
