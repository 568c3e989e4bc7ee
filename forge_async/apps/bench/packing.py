"""`bench packing`: what packing long-tailed samples into rows saves, and how even the ranks' work is.

`packed` and `padded` train the same batches with the same model, in turn: samples packed into rows, and one sample a
row, padded to the longest of its micro-batch. `balance/ranks=N` computes nothing on a model: it lays out a batch of
long samples for N ranks, which wait for each other in every micro-batch, and adds up what they wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan, in_another_process
from forge_async.backends.only_rank import be_the_only_rank
from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.learner.batch import split_samples
from forge_async.learner.layout import Layout, lay_out
from forge_async.learner.packing import sample_costs
from forge_async.learner.settings import LearnerSettings, ObjectiveSettings, OptimizerSettings

NUM_SAMPLES, MEDIAN_TOKENS, SPREAD, LONGEST_TOKENS = 512, 24, 1.0, 256
"""A batch: lognormal lengths, as many as the tiny model's positions at most."""
PROMPT_TOKENS = 4
CASES = {"packed": True, "padded": False}
BALANCED_RANKS = (2, 8)
LONG = Layout(row_tokens=8192, micro_batch_tokens=65_536)
"""Layout of the samples of `balance`, 256 a rank: lognormal about 2,048 tokens, 32,768 at most."""
AIMS = {"useful_fraction": 0.98, "speedup": 2.0, "imbalance": 0.03}


def measure(plan: Plan) -> Report:
    """Train in turn with both layouts, in a process of its own, then lay out for several ranks."""
    folder = plan.model_folder()
    rows = in_another_process(_train_in_turn, folder, plan.rounds, plan.config.root.seed)
    rows += [balance_row(ranks, plan.config.root.seed, plan.rounds) for ranks in BALANCED_RANKS]
    speedup = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
    waits = " and ".join(f"{row['imbalance_fraction']:.1%} ({row['case']})" for row in rows[2:])
    notes = [
        f"packed: {rows[0]['useful_fraction']:.1%} of the computed tokens are useful "
        f"(aim: {AIMS['useful_fraction']:.0%}), at {speedup:.1f} times the padded rate "
        f"(aim: at least {AIMS['speedup']:g}).",
        f"balance: ranks wait {waits} for each other, by the cost of their samples "
        f"(aim: under {AIMS['imbalance']:.0%}).",
    ]
    return Report(bench="packing", rows=rows, notes=notes)


def long_tailed(num: int, median_tokens: int, longest_tokens: int, seed: int) -> np.ndarray:
    """int32 [num]: lognormal lengths, the longest cut."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median_tokens), SPREAD, size=num)
    return np.clip(drawn, PROMPT_TOKENS + 1, longest_tokens).astype(np.int32)


def samples_of(lengths: np.ndarray, seed: int) -> Samples:
    """Samples of a short prompt and random tokens, advantages of both signs."""
    rng, total = np.random.default_rng(seed), int(lengths.sum())
    mask = np.concatenate([np.arange(length) >= PROMPT_TOKENS for length in lengths])
    signs = np.repeat(rng.choice([-1.0, 1.0], size=len(lengths)), lengths)
    runs = [run for length in lengths for run in ((PROMPT_TOKENS, NOT_SAMPLED, 0), (int(length) - PROMPT_TOKENS, 0, 0))]
    return Samples(
        lengths=lengths,
        token_ids=rng.integers(3, 90, size=total).astype(np.int32),
        loss_mask=mask,
        logprobs=(-4.0 * mask).astype(np.float32),
        advantages=(signs * mask).astype(np.float32),
        versions=VersionRuns.of(runs),
    )


def balance_row(ranks: int, seed: int, rounds: int) -> dict[str, Any]:
    """What ranks wait for each other as a share of the work: the median and the worst of as many batches as rounds."""
    found = [
        imbalance(long_tailed(256 * ranks, 2048, 32_768, seed + number).tolist(), ranks) for number in range(rounds)
    ]
    return {
        "case": f"balance/ranks={ranks}",
        "imbalance_fraction": median(found),
        "imbalance_worst_fraction": max(found),
    }


def imbalance(lengths: Sequence[int], num_ranks: int) -> float:
    """Time of a step in which each micro-batch lasts as long as on its slowest rank, over that of even work, less 1."""
    costs = sample_costs(lengths, LONG.attention_tokens)
    ranks = lay_out(lengths, LONG, num_ranks)
    loads = np.array([[sum(costs[index] for row in batch for index in row) for batch in mine] for mine in ranks])
    return float(loads.max(0).sum() / (loads.sum() / num_ranks) - 1)


def _train_in_turn(folder: Path, rounds: int, seed: int) -> list[dict[str, Any]]:
    learners = {case: _learner(folder, packed, seed) for case, packed in CASES.items()}
    timed: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    useful: dict[str, float] = {}
    for number in range(rounds + 1):  # the first one warms up
        samples = samples_of(long_tailed(NUM_SAMPLES, MEDIAN_TOKENS, LONGEST_TOKENS, seed + number), seed)
        for case, learner in learners.items():
            cpu_s = time.process_time()
            result = learner.train(split_samples(samples, 1, Layout.of(_settings(CASES[case])))[0])
            timed[case].append((samples.num_tokens / result.compute_s, time.process_time() - cpu_s))
            useful[case] = samples.num_tokens / result.num_row_tokens
    return [
        {
            "case": case,
            "useful_fraction": useful[case],
            "tokens_per_s": median(rate for rate, _ in timed[case][1:]),
            "cpu_s": median(cpu_s for _, cpu_s in timed[case][1:]),
        }
        for case in CASES
    ]


def _learner(folder: Path, packed: bool, seed: int) -> Any:
    be_the_only_rank()
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss

    return TitanLearner(
        folder,
        loss=objective_loss(ObjectiveSettings(), "token_is"),
        learner=_settings(packed),
        optimizer=OptimizerSettings(),
        total_steps=100,
        seed=seed,
    )


def _settings(packed: bool) -> LearnerSettings:
    return LearnerSettings(row_tokens=LONGEST_TOKENS, micro_batch_tokens=2048, packed=packed)
