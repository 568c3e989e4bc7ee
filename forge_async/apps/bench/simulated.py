"""The simulated rows of `bench overlap`: the product's loops, replay and group making over parts that sleep.

Sleeping is skipped and the CPU seconds of the code are added, so a step takes as long as it would on a machine that has
the 16 replicas, and its measurement takes a fraction of that. Each workload is measured in the same call stage by
stage, alone (the other parts take no time) and saturated, then synchronously, then with each set of dials.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import mean
from typing import Any

from forge_async.apps.bench.figures import DROPPED_STEPS, Stages
from forge_async.apps.bench.output import num_cores
from forge_async.backends.simulated.times import EngineTimes, LearnerTimes, LogNormalLengths, RewardTimes
from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.backends.simulated.world import SimulatedPlan, SimulatedWorld
from forge_async.core.errors import ForgeError
from forge_async.pipeline.ports import Admission, GroupRecord, LearnerStep, Pull
from forge_async.pipeline.publish import Publication
from forge_async.replay.settings import BUFFERS, SWAP_MODES, AsyncSettings

COUNTED_STEPS = 7
"""Steps of a run whose times count, after the first ones and before the last S."""
NUM_REPLICAS, GROUPS_PER_STEP, GROUP_SIZE = 16, 128, 4
"""At S = 2, 256 groups are in flight or wait for the learner while it trains on 128."""
PROMPT_TOKENS, MEAN_TOKENS, STAGE_S = 8, 64, 20.0
"""Means of a completion, and seconds of a stage that others are balanced against."""
QUEUE_BATCHES = 6
"""The token cap, in batches: more than any bound here allows, so that it acts on `stream` only."""
INSTANT_S = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A workload: how long the stages take."""

    name: str
    """Part of the case's name; "" for the one that the fraction of ideal is quoted from."""
    sigma: float
    """Of the completions' log-normal lengths."""
    waves: int
    """Batches of rollouts, one after the other, that a replica needs for its share of a step."""
    fixed_share: float
    """Of the engine's step time: near 1, a straggler is as slow alone as in company."""
    generate_s: float = 0.93 * STAGE_S
    """About Tg."""
    score_s: float = 0.02 * STAGE_S
    """Tr."""
    train_s: float = STAGE_S
    """About Tt."""

    def plan(self, dials: AsyncSettings, num_steps: int) -> SimulatedPlan:
        """A run of this workload."""
        slots = GROUPS_PER_STEP * GROUP_SIZE // NUM_REPLICAS // self.waves
        token_s = self.generate_s / MEAN_TOKENS / self.waves
        batch_tokens = GROUPS_PER_STEP * GROUP_SIZE * (PROMPT_TOKENS + MEAN_TOKENS)
        engine = EngineTimes(
            full_token_s=token_s,
            fixed_share=self.fixed_share,
            max_sequences=slots,
            prefill_token_s=token_s / slots / 20,
            resubmit_s=0.002,
            fetch_s=0.025 * STAGE_S,
            swap_s=0.0025 * STAGE_S,
        )
        return SimulatedPlan(
            lengths_of=LogNormalLengths(mean_tokens=MEAN_TOKENS, sigma=self.sigma),
            dials=replace(dials, max_queue_tokens=QUEUE_BATCHES * batch_tokens),
            num_steps=num_steps,
            groups_per_step=GROUPS_PER_STEP,
            group_size=GROUP_SIZE,
            prompt_tokens=PROMPT_TOKENS,
            engines=(engine,) * NUM_REPLICAS,
            learner=LearnerTimes(
                token_s=self.train_s / batch_tokens, snapshot_s=0.001 * STAGE_S, publish_s=0.025 * STAGE_S
            ),
            rewards=RewardTimes(call_s=self.score_s / (GROUPS_PER_STEP * GROUP_SIZE) * 64, num_slots=64),
            patience_s=1e5,
        )


EVEN = Work(name="", sigma=0.4, waves=8, fixed_share=0.2)
"""Long-tailed lengths whose longest rollout is short beside a step, so that a synchronous step is a fair baseline."""
JUDGE = replace(EVEN, name="judge", score_s=0.93 * STAGE_S)
"""Scoring by a model, as slow as generation."""
EQUAL = replace(EVEN, name="equal", sigma=0.0)
"""Every completion as long as every other: what is lost here, stragglers did not cost."""
STRAGGLERS = Work(name="stragglers", sigma=0.8, waves=2, fixed_share=0.6)
"""The longest rollouts take longer than a step, and are hardly faster alone."""


@dataclass(slots=True)
class Log:
    """An Observer that keeps when what happened, on the run's clock."""

    stepped_s: list[float] = field(default_factory=list)
    steps: list[LearnerStep] = field(default_factory=list)
    pulls: list[tuple[float, Pull]] = field(default_factory=list)
    clock: LoopClock = field(default_factory=LoopClock)

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None: ...

    def made(self, records: Sequence[GroupRecord]) -> None: ...

    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None:
        self.stepped_s.append(self.clock.now_s())
        self.steps.append(ranks[0])

    def published(self, publication: Publication) -> None: ...

    def pulled(self, replica: str, pull: Pull) -> None:
        self.pulls.append((self.clock.now_s(), pull))


def simulate(plan: SimulatedPlan) -> tuple[SimulatedWorld, Log]:
    """Run to the last step; returns the parts and what was noted."""

    async def run() -> tuple[SimulatedWorld, Log]:
        log = Log()
        world = SimulatedWorld(plan, LoopClock(), log)
        await world.run()
        return world, log

    return run_virtually(run(), count_work=True)


def num_steps_of(max_staleness: int) -> int:
    """Steps of a run of which COUNTED_STEPS count."""
    return DROPPED_STEPS + COUNTED_STEPS + max_staleness


def step_s_of(log: Log) -> float:
    """Mean seconds of the steps that count."""
    return (log.stepped_s[DROPPED_STEPS + COUNTED_STEPS - 1] - log.stepped_s[DROPPED_STEPS - 1]) / COUNTED_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A workload's stages, each measured alone."""

    stages: Stages
    """Saturated: enough groups in flight that no slot is ever free."""
    batch_s: float
    """Generation of one batch by itself, from its first token to the last rollout's last."""

    @property
    def straggler_gain(self) -> float:
        """How much faster batches are made one on top of the other than one after the other."""
        return self.batch_s / self.stages.generate_s


def measure_alone(work: Work) -> Alone:
    """Run each stage with the others instantaneous."""
    whole = work.plan(AsyncSettings(max_staleness=4), num_steps_of(4))
    no_engine = tuple(replace(times, full_token_s=INSTANT_S, fetch_s=0.0, swap_s=0.0) for times in whole.engines)
    idle = replace(whole, engines=no_engine, learner=LearnerTimes(), rewards=RewardTimes())
    generating = tuple(replace(times, fetch_s=0.0, swap_s=0.0) for times in whole.engines)
    synchronous = replace(whole.dials, max_staleness=0)
    syncing = tuple(replace(times, full_token_s=INSTANT_S) for times in whole.engines)
    publishing = LearnerTimes(publish_s=whole.learner.publish_s)

    def step_s(**parts: Any) -> float:
        return step_s_of(simulate(replace(idle, **parts))[1])

    return Alone(
        stages=Stages(
            generate_s=step_s(engines=generating),
            score_s=step_s(rewards=whole.rewards),
            train_s=step_s(learner=replace(whole.learner, publish_s=0.0)),
            sync_s=step_s(engines=syncing, learner=publishing, dials=synchronous),
        ),
        batch_s=step_s(engines=generating, dials=synchronous),
    )


def rows_of(
    work: Work, cases: Sequence[tuple[str, AsyncSettings]], pool: Executor | None = None
) -> list[dict[str, Any]]:
    """Figures of each case of a workload, the synchronous baseline first; in the processes of `pool`, if given."""
    alone = measure_alone(work)
    names, dials = zip(("S=0/keep_kv", AsyncSettings(max_staleness=0)), *cases, strict=True)
    found = (pool.map if pool else map)(partial(case_figures, work, alone), dials)
    rows: list[dict[str, Any]] = []
    for name, own in zip(names, found, strict=True):
        case = "/".join(word for word in ("simulated", work.name, name) if word)
        print(case, flush=True)
        baseline_s = rows[0]["step_s"] if rows else own["step_s"]
        rows.append({"case": case, **own, "speedup_measured": baseline_s / own["step_s"]})
    rows[0] |= baseline_figures(alone, rows[0]["step_s"])
    return rows


def baseline_figures(alone: Alone, step_s: float) -> dict[str, float]:
    """What says whether the fraction of ideal may be quoted, and what removing stragglers gains."""
    stages = alone.stages
    return {
        "generate_over_train": stages.generate_s / stages.train_s,
        "step_over_chain": step_s / stages.chain_s,
        "straggler_gain": alone.straggler_gain,
    }


def case_figures(work: Work, alone: Alone, dials: AsyncSettings) -> dict[str, float]:
    """Run one case. Raises ForgeError when it did not train every step."""
    bound = bound_of(dials)
    plan = work.plan(dials, num_steps_of(min(bound, QUEUE_BATCHES)))
    world, log = simulate(plan)
    if len(log.steps) != plan.num_steps:
        raise ForgeError(f"The simulated run ended after {len(log.steps)} of {plan.num_steps} steps.")
    step_s, counted = step_s_of(log), slice(DROPPED_STEPS, DROPPED_STEPS + COUNTED_STEPS)
    steps = log.steps[counted]
    busy_s = mean(step.result.compute_s + step.snapshot_s for step in steps)
    wait_s = mean(step.wait_data_s for step in steps)
    ideal_s = alone.stages.ideal_step_s(bound)
    costs = [replica.engine.cost for replica in world.replicas]
    return {
        "step_s": step_s,
        "generate_s": alone.stages.generate_s,
        "score_s": alone.stages.score_s,
        "train_s": alone.stages.train_s,
        "sync_s": alone.stages.sync_s,
        "ideal_step_s": ideal_s,
        "fraction_of_ideal": ideal_s / step_s,
        "learner_idle_fraction": max(0.0, 1.0 - busy_s / step_s),
        "unaccounted_fraction": max(0.0, 1.0 - (busy_s + wait_s) / step_s),
        "staleness_max": max(step.batch["staleness/max"] for step in steps),
        "staleness_mean": mean(step.batch["staleness/mean"] for step in steps),
        "pause_s": sum(cost.pause_s for cost in costs) / len(costs) / plan.num_steps,
        "discarded_tokens": sum(cost.discarded_tokens for cost in costs) / plan.num_steps,
        "recomputed_tokens": sum(cost.recomputed_tokens for cost in costs) / plan.num_steps,
    }


def bound_of(dials: AsyncSettings) -> int:
    """S of the dials; of `stream`, which has none, so much that it does not show in the ideal."""
    return {"none": 0, "double": 1, "bounded": dials.max_staleness, "stream": 10**6}[dials.buffer]


def at(*bounds: int, swap: str = "keep_kv") -> Sequence[tuple[str, AsyncSettings]]:
    """Cases by S."""
    return [(f"S={bound}/{swap}", AsyncSettings(max_staleness=bound, swap=swap)) for bound in bounds]


def measure() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and notes of all workloads."""
    swaps = [case for swap in SWAP_MODES if swap != "keep_kv" for case in at(2, swap=swap)]
    buffers = [(f"buffer={buffer}/keep_kv", AsyncSettings(buffer=buffer)) for buffer in BUFFERS]
    wide = AsyncSettings(max_staleness=4, window=GROUPS_PER_STEP)
    cases = {
        EVEN: [*at(1, 2, 4), *swaps, *buffers],
        EQUAL: at(1, 2),
        JUDGE: at(2, 4),
        STRAGGLERS: [*at(1, 2, 4), (f"S=4/W={GROUPS_PER_STEP}/keep_kv", wide)],
    }
    # A process a core: what each adds to its clock are its own CPU seconds.
    with ProcessPoolExecutor(num_cores(), mp_context=multiprocessing.get_context("spawn")) as pool:
        rows = [row for work, of_work in cases.items() for row in rows_of(work, of_work, pool)]
    return rows, notes(rows[0])


def notes(baseline: dict[str, Any]) -> list[str]:
    """What a reader must know."""
    return [
        "simulated: parts that sleep under the product's loops, replay and group making, in one process; sleeping is "
        "skipped, the CPU seconds of the code count. Their generate_s, score_s, train_s and sync_s are measured alone.",
        f"simulated: Tg/Tt is {baseline['generate_over_train']:.2f} and the synchronous step "
        f"{baseline['step_over_chain']:.2f} times Tg+Tr+Tt+Ts (limit for quoting the fraction of ideal: 1.1); batches "
        f"made one on top of the other are {baseline['straggler_gain']:.2f} times as fast as one after the other.",
        "simulated/equal: all completions are equally long; what S=1 reaches here and not above, stragglers cost.",
        "simulated/stragglers: shown apart; here the longest rollouts take longer than a step, so that its fractions "
        "are not comparable and its synchronous step is no fair baseline.",
    ]
