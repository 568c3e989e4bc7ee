"""The ring in simulated time under random delays and failures: it never stalls, and Laws 1 and 2 hold end to end.

The loops, the replay, the publisher and the group making are the product's; engines, learner and scorer sleep. Every
wait in the replay has a deadline of simulated time, so a ring that stalls raises StallError, and one in which nothing
can ever happen again is found by the loop itself. Laws are held against what the source was asked for and what the
learner consumed, not against the ledger's own figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest

from forge_async.backends.simulated.task import SimulatedSource
from forge_async.backends.simulated.times import EngineTimes, LearnerTimes, LogNormalLengths, RewardTimes
from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.backends.simulated.world import SimulatedPlan, SimulatedWorld
from forge_async.core.errors import StallError, unwrap
from forge_async.core.records import PromptId
from forge_async.replay.settings import SWAP_MODES, AsyncSettings

PATIENCE_S = 5000.0
"""Of the simulated clock: far more than any schedule here needs for anything."""


@dataclass
class Notes:
    """An Observer that keeps the prompts of the groups, and counts pulls."""

    prompts: dict[int, PromptId] = field(default_factory=dict)
    num_pulls: int = 0

    def admitted(self, admissions, replica):
        for one in admissions:
            assert self.prompts.setdefault(one.index, one.prompt_id) == one.prompt_id, "a group's prompt changed"

    def made(self, records): ...

    def stepped(self, step, ranks): ...

    def published(self, publication): ...

    def pulled(self, replica, pull):
        self.num_pulls += 1


def draw_dials(random: Random) -> tuple[int, AsyncSettings]:
    buffer = random.choice(("none", "double", "bounded", "bounded", "bounded", "stream"))
    bound = random.choice((0, 1, 1, 4))
    every = random.randint(1, {"none": 1, "double": 2, "bounded": bound + 1, "stream": 3}[buffer])
    groups_per_step = random.choice((1, 2, 4))
    window = random.randint(1, (bound - every + 1) * groups_per_step + 1) if buffer == "bounded" else 1
    order = random.choice(("windowed_fifo", "freshest"))
    return groups_per_step, AsyncSettings(
        buffer=buffer, max_staleness=bound, window=window, publish_every=every, order=order,
        swap=random.choice(SWAP_MODES), max_queue_tokens=random.choice((1, 60, 10**6)),
        # Where replicas live shorter than groups take, both limits are reached by right; they have tests of their own.
        max_attempts=10**6, max_filtered_batches=10**6,
    )  # fmt: skip


def draw_plan(random: Random) -> SimulatedPlan:
    groups_per_step, dials = draw_dials(random)
    group_size = random.choice((1, 2, 3))
    slow = {
        call: random.choice((0.0, 0.01, 0.5, 3.0)) for call in ("admit", "put", "end", "trained", "published", "pulled")
    }
    return SimulatedPlan(
        lengths_of=LogNormalLengths(mean_tokens=random.choice((2, 10)), sigma=random.choice((0.0, 0.5, 1.5)),
                                    seed=random.randrange(100)),
        dials=dials,
        num_steps=random.randint(1, 6),
        groups_per_step=groups_per_step,
        group_size=group_size,
        prompt_tokens=2,
        num_prompts=7,
        engines=[draw_engine(random) for _ in range(random.randint(1, 3))],
        learner=LearnerTimes(
            step_s=random.choice((0.0, 1.0, 10.0)),
            snapshot_s=random.choice((0.0, 0.1)),
            publish_s=random.choice((0.0, 0.5, 20.0)),
        ),
        rewards=RewardTimes(call_s=random.choice((0.0, 0.1, 3.0)), num_slots=random.choice((1, 8))),
        linger_s=random.choice((0.0, 1.0)),
        zero_variance=random.choice(("keep", "refill")) if group_size > 1 else "keep",
        seconds_of=lambda call: random.uniform(0.0, slow.get(call, 0.0)),
        patience_s=PATIENCE_S,
        seed=random.randrange(1000),
    )  # fmt: skip


def draw_engine(random: Random) -> EngineTimes:
    return EngineTimes(
        full_token_s=random.choice((0.01, 0.1, 1.0)),
        fixed_share=random.choice((0.1, 1.0)),
        max_sequences=random.choice((1, 3, 16)),
        prefill_token_s=random.choice((0.0, 0.01)),
        resubmit_s=random.choice((0.0, 0.1)),
        fetch_s=random.choice((0.0, 1.0, 30.0)),
        swap_s=random.choice((0.0, 0.2)),
    )


def check_laws(world: SimulatedWorld, notes: Notes) -> None:
    """Laws 1 and 2 from outside: prompts as the source numbers them, batches as the learner consumed them."""
    plan, bound, trained = world.plan, world.replay.inner.bound, world.learner.trained
    consumed = [index for batch in trained for index, *_ in batch]
    assert [len(batch) for batch in trained] == [plan.groups_per_step] * plan.num_steps
    assert len(set(consumed)) == len(consumed), "a group was trained on twice"
    for step, batch in enumerate(trained):
        assert [index for index, *_ in batch] == sorted(index for index, *_ in batch)
        for index, prompt_id, oldest_step in batch:
            assert prompt_id == nth_prompt(index, plan.num_prompts), "a prompt was skipped or drawn twice"
            assert 0 <= step - oldest_step <= bound.max_staleness, f"group {index} at step {step} has {oldest_step}"
    assert all(prompt_id == nth_prompt(index, plan.num_prompts) for index, prompt_id in notes.prompts.items())
    ledger = world.replay.inner.ledger
    ledger.check(deep=True)
    assert ledger.outcomes["trained"] == len(consumed)
    assert sum(ledger.outcomes.values()) == ledger.num_admitted
    assert set(notes.prompts) <= set(range(ledger.num_admitted)) and set(consumed) <= set(notes.prompts)


def nth_prompt(index: int, epoch_size: int) -> PromptId:
    """The prompt of the group of that admission index: prompts are drawn in order, none is skipped or repeated."""
    return PromptId(source=SimulatedSource.name, epoch=index // epoch_size, index=index % epoch_size)


class FlakyWorkers:
    """Workers some of whose groups fail or expire, after a while, instead of being made."""

    def __init__(self, world: SimulatedWorld, random: Random, share: float) -> None:
        self._inner, self._world, self._random, self._share = world.workers, world, random, share

    async def make(self, admissions, replica):
        good = []
        for one in admissions:
            if self._random.random() >= self._share:
                good.append(one)
                continue
            await self._world.clock.sleep(self._random.uniform(0.0, 5.0))
            outcome = self._random.choice(("failed", "expired"))
            await self._world.calls.end(one.index, outcome, "a test wants it", one.attempt)
        return await self._inner.make(good, replica) if good else []


class MortalReplicas:
    """Runs the ring's own loops for each replica until it dies; another one, of another speed, joins after a while.

    A replica that is only believed to be dead goes on making what it has, and hands it in late.
    """

    def __init__(self, world: SimulatedWorld, random: Random, mean_life_s: float) -> None:
        self.world, self.random, self.mean_life_s = world, random, mean_life_s
        self.num_deaths = 0
        self._opened = list(world.replicas)

    async def run(self) -> None:
        version = await self.world.prepare()
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(self._succession(group, one, version)) for one in self.world.replicas]
            await self.world.ring._train(group, version)
            await self.world.calls.close("the last step is done")
            for task in lives:
                task.cancel()
            for replica in self._opened:
                await replica.close()
            group.create_task(self._end(group, {asyncio.current_task(), *lives}))

    async def _end(self, group, spared) -> None:
        """End what believed-dead replicas were still making."""
        for task in group._tasks - spared - {asyncio.current_task()}:
            task.cancel()

    async def _succession(self, group, replica, version) -> None:
        while True:
            silent = self.random.random() < 0.5
            loops = [
                group.create_task(self.world.ring._generate(group, replica)),
                group.create_task(self.world.ring._pull(replica, version)),
            ]
            try:
                await self.world.clock.sleep(self.random.expovariate(1.0 / self.mean_life_s))
            finally:
                for task in loops:
                    task.cancel()
            self.num_deaths += 1
            if silent:
                await replica.close()
            await self.world.clock.sleep(self.random.uniform(0.0, 3.0))
            await self.world.calls.remove_replica(replica.name)
            await self.world.clock.sleep(self.random.uniform(0.0, 20.0))
            replica, version = await self._join(f"{replica.name.split('.')[0]}.{self.num_deaths}")

    async def _join(self, name):
        world = self.world
        version = await world.publisher.newer_than(None)
        replica = world.make_replica(name, draw_engine(self.random))
        self._opened.append(replica)
        world.policies[name] = replica
        await replica.start()
        await world.publisher.pull(replica, version)
        await world.calls.add_replica(name, version.step)
        return replica, version


def run_schedule(seed: int, *, mean_life_s: float = 0.0, fail_share: float = 0.0) -> int:
    """Draw a schedule, run it and check the laws. Returns the number of replicas that died."""
    random, notes = Random(seed), Notes()
    plan = draw_plan(random)

    async def scenario():
        world = SimulatedWorld(plan, LoopClock(), notes)
        before = asyncio.all_tasks()
        if fail_share:
            world.ring._workers = FlakyWorkers(world, random, fail_share)
        mortal = MortalReplicas(world, random, mean_life_s)
        await (mortal.run() if mean_life_s else world.run())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "a task outlived the ring"
        return world, mortal.num_deaths

    world, num_deaths = run_virtually(scenario())
    check_laws(world, notes)
    if not mean_life_s:
        assert world.replay.inner.num_stale == 0, "the admission rule alone lets nothing grow too old"
    return num_deaths


def run_schedules(chunk: int, num_chunks: int, num_schedules: int, **disturbances: float) -> list[int]:
    """Run a chunk of the numbered schedules; a failure names its number."""
    found = []
    for seed in range(chunk, num_schedules, num_chunks):
        try:
            found.append(run_schedule(seed, **disturbances))
        except Exception as error:
            raise AssertionError(f"schedule {seed}, {disturbances}: {unwrap(error)!r}") from error
    return found


@pytest.mark.parametrize("chunk", range(4))
def test_no_schedule_of_delays_stalls_the_ring_or_breaks_a_law(chunk):
    run_schedules(chunk, 4, 400)


@pytest.mark.parametrize("chunk", range(2))
def test_groups_that_fail_or_expire_stall_nothing(chunk):
    run_schedules(chunk, 2, 200, fail_share=0.3)


@pytest.mark.parametrize("chunk", range(4))
def test_replicas_that_die_and_join_stall_nothing(chunk):
    assert sum(run_schedules(chunk, 4, 400, mean_life_s=15.0, fail_share=0.1)) > 100


def run_plan(plan: SimulatedPlan) -> tuple[SimulatedWorld, Notes, float]:
    """Run a plan; returns the parts, what was noted, and the simulated seconds that it took."""
    notes = Notes()

    async def scenario():
        world = SimulatedWorld(plan, LoopClock(), notes)
        await world.run()
        return world, LoopClock().now_s()

    world, ended_s = run_virtually(scenario())
    return world, notes, ended_s


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("fetch_s", [0.0, 1.0, 40.0])
def test_synchronous_training_never_stalls_however_slow_the_pull(fetch_s, num_replicas):
    """Fifty steps of about 12 s; the slowest pull takes longer than three of them."""
    engine = EngineTimes(full_token_s=0.1, max_sequences=8, fetch_s=fetch_s)
    plan = SimulatedPlan(
        lengths_of=LogNormalLengths(mean_tokens=10, sigma=1.0),
        dials=AsyncSettings(max_staleness=0),
        num_steps=50,
        groups_per_step=4,
        group_size=2,
        engines=[replace(engine, fetch_s=fetch_s * (1 + number)) for number in range(num_replicas)],
        learner=LearnerTimes(step_s=10.0, publish_s=1.0),
        patience_s=60.0 + num_replicas * fetch_s,
    )
    world, notes, _ = run_plan(plan)
    check_laws(world, notes)
    assert notes.num_pulls == 50 * num_replicas


STEP_S = 10.0


def two_classes(request) -> np.ndarray:
    """Completions that take about one step, and for every fourth group about six."""
    return np.full(request.num_samples, 60 if int(request.id) % 4 == 0 else 10, dtype=np.int32)


def test_slow_prompts_are_trained_in_the_proportion_drawn_and_nothing_is_discarded():
    """Latencies of 1 and 6 steps at S = 3. Systems that drop what is too old never train the slow class."""
    plan = SimulatedPlan(
        lengths_of=two_classes,
        dials=AsyncSettings(max_staleness=3),
        num_steps=60,
        groups_per_step=8,
        group_size=2,
        engines=[EngineTimes(full_token_s=STEP_S / 10, fixed_share=1.0, max_sequences=64, fetch_s=0.5)] * 2,
        learner=LearnerTimes(step_s=STEP_S, publish_s=0.5),
        patience_s=PATIENCE_S,
    )
    world, notes, ended_s = run_plan(plan)
    check_laws(world, notes)
    steady = [index for batch in world.learner.trained[5:-5] for index, *_ in batch]
    slow = sum(index % 4 == 0 for index in steady) / len(steady)
    assert slow == pytest.approx(0.25, rel=0.05)
    figures = world.replay.inner.state()
    assert figures["groups/expired"] == figures["groups/late"] == figures["groups/requeued"] == 0
    assert ended_s < 60 * 3 * STEP_S, "a batch that waits six steps for its slow groups shares that wait with S others"


def test_a_ring_without_a_way_to_go_on_is_told_by_its_replica_and_its_groups():
    """The test of the tests: an engine that never finishes is a stall with a name."""
    plan = SimulatedPlan(
        lengths_of=lambda request: np.full(request.num_samples, 10**9, dtype=np.int32), patience_s=PATIENCE_S
    )
    with pytest.raises(ExceptionGroup) as caught:
        run_plan(plan)
    stall = next(error for error in caught.value.exceptions if "for a batch" in str(error))
    assert isinstance(stall, StallError)
    assert "step 0 needs 8 groups: 0 are ready, 24 in flight" in str(stall)
    assert "group 0 (on replica policy_0)" in str(stall)
