"""`bench packing`: what packing long-tailed samples into rows saves, and how even the ranks' work is.

`packed` and `padded` train the same batches with the same model, in turn: samples packed into rows, and one sample a
row, padded to the longest of its micro-batch. So do `prompts/shared` and `prompts/apart`, on batches of groups whose
prompt is computed once for the samples of a row, or with each of them. `balance/ranks=N` computes nothing on a model:
it lays out a batch of long samples for N ranks, which wait for each other in every micro-batch, and adds up what they
wait.
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
GROUP_SIZE, GROUP_PROMPT_TOKENS = 8, 32
"""Of the batches with groups: as many samples, whose prompts are about as long as their completions."""
CASES: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "padded": {"packed": False},
    "prompts/shared": {"share_prompts": True},
    "prompts/apart": {"share_prompts": False},
}
"""What each case sets of `learner`."""
BALANCED_RANKS = (2, 8)
LONG = Layout(row_tokens=8192, micro_batch_tokens=65_536)
"""Layout of the samples of `balance`, 256 a rank: lognormal about 2,048 tokens, 32,768 at most."""
AIMS = {"useful_fraction": 0.98, "speedup": 2.0, "imbalance": 0.03}


def measure(plan: Plan) -> Report:
    """Train in turn with both layouts, in a process of its own, then lay out for several ranks."""
    folder = plan.model_folder()
    rows = in_another_process(_train_in_turn, folder, plan.rounds, plan.config.root.seed)
    speedup, sharing = (rows[at]["tokens_per_s"] / rows[at + 1]["tokens_per_s"] for at in (0, 2))
    balance = [balance_row(ranks, plan.config.root.seed, plan.rounds) for ranks in BALANCED_RANKS]
    waits = " and ".join(f"{row['imbalance_fraction']:.1%} ({row['case']})" for row in balance)
    notes = [
        f"packed: {rows[0]['useful_fraction']:.1%} of the computed tokens are useful "
        f"(aim: {AIMS['useful_fraction']:.0%}), at {speedup:.1f} times the padded rate "
        f"(aim: at least {AIMS['speedup']:g}).",
        f"prompts: groups of {GROUP_SIZE} that share prompts of {GROUP_PROMPT_TOKENS} tokens train at "
        f"{sharing:.1f} times the rate of samples that do not.",
        f"balance: ranks wait {waits} for each other, by the cost of their samples "
        f"(aim: under {AIMS['imbalance']:.0%}).",
    ]
    return Report(bench="packing", rows=rows + balance, notes=notes)


def long_tailed(num: int, median_tokens: int, longest_tokens: int, seed: int) -> np.ndarray:
    """int32 [num]: lognormal lengths, the longest cut."""
    drawn = np.random.default_rng(seed).lognormal(np.log(median_tokens), SPREAD, size=num)
    return np.clip(drawn, PROMPT_TOKENS + 1, longest_tokens).astype(np.int32)


def samples_of(lengths: np.ndarray, seed: int, prompt_tokens: int = PROMPT_TOKENS, group_size: int = 1) -> Samples:
    """Samples of a prompt and random tokens, advantages of both signs; those of a group begin with the same prompt."""
    rng, total = np.random.default_rng(seed), int(lengths.sum())
    mask = np.concatenate([np.arange(length) >= prompt_tokens for length in lengths])
    signs = np.repeat(rng.choice([-1.0, 1.0], size=len(lengths)), lengths)
    runs = [run for length in lengths for run in ((prompt_tokens, NOT_SAMPLED, 0), (int(length) - prompt_tokens, 0, 0))]
    token_ids = rng.integers(3, 90, size=total)
    starts = np.cumsum(lengths) - lengths
    for number, start in enumerate(starts):
        first = starts[number - number % group_size]
        token_ids[start : start + prompt_tokens] = token_ids[first : first + prompt_tokens]
    return Samples(
        lengths=lengths,
        token_ids=token_ids.astype(np.int32),
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
    costs = sample_costs(np.array(lengths), LONG.attention_tokens).tolist()
    ranks = lay_out(lengths, LONG, num_ranks)
    loads = np.array([[sum(costs[index] for row in batch for index in row) for batch in mine] for mine in ranks])
    return float(loads.max(0).sum() / (loads.sum() / num_ranks) - 1)


def _train_in_turn(folder: Path, rounds: int, seed: int) -> list[dict[str, Any]]:
    learners = {case: _learner(folder, settings, seed) for case, settings in CASES.items()}
    timed: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    useful: dict[str, float] = {}
    for number in range(rounds + 1):  # the first one warms up
        for case, learner in learners.items():
            samples = _batch(case, seed, number)
            cpu_s = time.process_time()
            result = learner.train(split_samples(samples, 1, Layout.of(_settings(CASES[case])))[0])
            timed[case].append((samples.num_tokens / result.compute_s, time.process_time() - cpu_s))
            useful[case] = result.num_sample_tokens / result.num_row_tokens
    return [
        {
            "case": case,
            "useful_fraction": useful[case],
            "tokens_per_s": median(rate for rate, _ in timed[case][1:]),
            "cpu_s": median(cpu_s for _, cpu_s in timed[case][1:]),
        }
        for case in CASES
    ]


def _batch(case: str, seed: int, number: int) -> Samples:
    lengths = long_tailed(NUM_SAMPLES, MEDIAN_TOKENS, LONGEST_TOKENS, seed + number)
    if not case.startswith("prompts/"):
        return samples_of(lengths, seed)
    lengths = (lengths + GROUP_PROMPT_TOKENS - PROMPT_TOKENS).clip(max=LONGEST_TOKENS)
    return samples_of(lengths, seed, GROUP_PROMPT_TOKENS, GROUP_SIZE)


def _learner(folder: Path, settings: dict[str, Any], seed: int) -> Any:
    be_the_only_rank()
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss

    return TitanLearner(
        folder,
        loss=objective_loss(ObjectiveSettings(), "token_is"),
        learner=_settings(settings),
        optimizer=OptimizerSettings(),
        total_steps=100,
        seed=seed,
    )


def _settings(settings: dict[str, Any]) -> LearnerSettings:
    return LearnerSettings(row_tokens=LONGEST_TOKENS, micro_batch_tokens=2048, **settings)
