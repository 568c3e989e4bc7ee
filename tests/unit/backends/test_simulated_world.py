"""The simulated ring: the product's loops and replay over parts that sleep."""

import ast
import dataclasses
from pathlib import Path

import pytest

import forge_async
from forge_async.apps.bench.simulated import Log
from forge_async.backends.simulated.task import SimulatedRewards, SimulatedSource
from forge_async.backends.simulated.times import EngineTimes, LearnerTimes, LogNormalLengths, RewardTimes
from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.backends.simulated.world import SimulatedPlan, SimulatedWorld
from forge_async.config import load
from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.records import PromptId
from forge_async.pipeline.auto_bound import AutoBound
from forge_async.pipeline.observers import Observers
from forge_async.replay.auto_staleness import AutoStaleness
from forge_async.replay.settings import SWAP_MODES, AsyncSettings
from forge_async.reward.ports import RewardCall

ENGINE = EngineTimes(full_token_s=0.05, max_sequences=16, fetch_s=0.2, swap_s=0.05, prefill_token_s=0.001)


def run(num_replicas=2, zero_variance="keep", **dials):
    plan = SimulatedPlan(
        lengths_of=LogNormalLengths(mean_tokens=20, sigma=0.6),
        dials=AsyncSettings(**dials),
        engines=(ENGINE,) * num_replicas,
        learner=LearnerTimes(step_s=1.0, publish_s=0.1, snapshot_s=0.02),
        rewards=RewardTimes(call_s=0.05, num_slots=8),
        group_size=2,
        zero_variance=zero_variance,
    )

    async def scenario():
        log = Log()
        world = SimulatedWorld(plan, LoopClock(), log)
        assert (await world.run()).step == plan.num_steps
        return world, log

    return run_virtually(scenario())


@pytest.mark.parametrize("swap", SWAP_MODES)
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_ring_trains_every_group_once_within_the_bound(swap, max_staleness):
    world, log = run(swap=swap, max_staleness=max_staleness)
    indices = [index for batch in world.learner.trained for index, *_ in batch]
    assert sorted(indices) == list(range(10 * 8))
    assert max(step.batch["staleness/max"] for step in log.steps) <= max_staleness
    assert {replica.engine.version.step for replica in world.replicas} == {10}


def test_synchronous_stages_take_turns_and_asynchronous_ones_overlap():
    durations = {bound: run(max_staleness=bound)[1].stepped_s[-1] for bound in (0, 2)}
    assert durations[2] < 0.75 * durations[0]


def test_the_same_run_twice_takes_the_same_time_to_the_last_bit():
    first, second = (run(max_staleness=2, zero_variance="refill")[1] for _ in range(2))
    assert first.stepped_s == second.stepped_s


def test_groups_of_equal_rewards_are_replaced_when_asked_for():
    world, _ = run(max_staleness=1, zero_variance="refill")
    ended = world.replay.inner.ledger.outcomes
    assert ended["filtered"] > 10 and ended["trained"] == 80


def test_scoring_takes_slots_in_order_of_arrival():
    async def scenario():
        rewards = SimulatedRewards(RewardTimes(call_s=2.0, num_slots=3), LoopClock())
        outcomes = await rewards.score([RewardCall(prompt="p", completion="c")] * 7)
        assert LoopClock().now_s() == pytest.approx(6.0), "three at a time"
        assert {outcome.require() for outcome in outcomes} <= {0.0, 1.0}
        assert rewards.busy_s == pytest.approx(14.0 / 3)

    run_virtually(scenario())


def test_a_prompt_of_another_source_is_refused():
    with pytest.raises(ForgeError, match="not one of the 5 prompts"):
        SimulatedSource(5, 3).prompt(PromptId(source="gsm", epoch=0, index=0))


def test_no_run_of_grpo_can_be_made_of_simulated_parts():
    """No key selects them, and nothing that a run is made of imports them."""
    with pytest.raises(ConfigError, match="backend"):
        load(["backend=simulated"])
    root = Path(forge_async.__file__).parent
    for path in sorted(root.rglob("*.py")):
        own = path.relative_to(root).as_posix()
        if own.startswith(("backends/simulated/", "apps/bench/", "apps/plan")):
            continue
        names = [
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        ]
        assert not [name for name in names if "simulated" in name], own


def test_slow_pulls_raise_the_bound_of_a_ring_and_their_end_lowers_it():
    """`async.max_staleness=auto` through the ring: between steps 20 and 60 each fetch takes 2 s longer."""
    dials = AsyncSettings(max_staleness="auto", max_staleness_cap=8)
    plan = SimulatedPlan(
        lengths_of=LogNormalLengths(mean_tokens=10, sigma=0.0),
        dials=dials,
        num_steps=110,
        engines=(EngineTimes(full_token_s=0.05, max_sequences=64, fetch_s=0.05),),
        learner=LearnerTimes(step_s=1.0, publish_s=0.05),
        group_size=2,
    )
    bounds, reasons = [], []

    async def scenario():
        auto = AutoStaleness.of(dials, plan.groups_per_step)
        assert auto is not None
        clock = LoopClock()
        bound = AutoBound(auto, clock.now_s)
        world = SimulatedWorld(plan, clock, Observers(Log(), bound))

        async def after_step(done):
            if move := bound.take_move():
                await world.calls.set_max_staleness(move.max_staleness)
                reasons.append(move.why)
            if done in (20, 60):
                (replica,) = world.replicas
                replica._times = dataclasses.replace(replica._times, fetch_s=2.05 if done == 20 else 0.05)
            bounds.append(world.replay.inner.bound.max_staleness)

        world.ring._after_step = after_step
        await world.run()

    run_virtually(scenario())
    before, during, after = max(bounds[10:20]), max(bounds[25:60]), bounds[-1]
    assert during > before >= after, bounds
    assert max(bounds) <= 8
    assert any("rollout, scoring, publish and pull take" in why for why in reasons)
