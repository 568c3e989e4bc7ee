"""A whole ring in one process: the product's loops, replay and group making over parts that sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forge_async.backends.simulated.learner import SimulatedLearner
from forge_async.backends.simulated.replica import SimulatedReplica
from forge_async.backends.simulated.task import SimulatedRenderer, SimulatedRewards, SimulatedSource
from forge_async.backends.simulated.times import EngineTimes, LearnerTimes, LengthsOf, RewardTimes
from forge_async.core.clock import Clock
from forge_async.core.records import Group
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.hand_over import GroupSink, make_and_hand_over
from forge_async.pipeline.make_groups import GroupMaker
from forge_async.pipeline.ports import Admission, GroupRecord, PolicyClient, WorkerReport
from forge_async.pipeline.publish import Publisher
from forge_async.pipeline.ring import Observer, Ring, RingSettings
from forge_async.policy.ports import Sampling
from forge_async.replay.admission import Prompts
from forge_async.replay.generating import groups_at_once
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from forge_async.replay.waiting import WaitingReplay
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.settings import RolloutSettings

SecondsOf = Callable[[str], float]
CALL_S = 0.001
"""Seconds of a call between two processes of one host, as measured for Monarch's endpoints."""
GROUP_TIMEOUT_S = 1e6
"""No simulated group is given up by the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPlan:
    """All that a simulated run is built from."""

    lengths_of: LengthsOf
    dials: AsyncSettings = field(default_factory=AsyncSettings)
    num_steps: int = 10
    groups_per_step: int = 8
    group_size: int = 4
    prompt_tokens: int = 8
    max_new_tokens: int = 1024
    num_prompts: int = 100_000
    engines: Sequence[EngineTimes] = (EngineTimes(),)
    """One for each replica."""
    learner: LearnerTimes = field(default_factory=LearnerTimes)
    rewards: RewardTimes = field(default_factory=RewardTimes)
    linger_s: float = 0.0
    """As `rollout.linger_s`."""
    zero_variance: str = "keep"
    """As `advantage.zero_variance`."""
    seconds_of: SecondsOf = lambda call: CALL_S
    """Seconds that a message to the replay takes, by the name of the call."""
    patience_s: float = 600.0
    """Deadline of each wait for groups or room."""
    keep_versions: int = 2
    seed: int = 0


class SimulatedCalls:
    """The replay as its callers see it: a message away. Implements the pipeline's `Replay` and `GroupSink`."""

    def __init__(self, replay: WaitingReplay, clock: Clock, seconds_of: SecondsOf, tells_generated: bool) -> None:
        """`tells_generated`: as in `RolloutPlan`."""
        self._replay, self._clock, self._seconds_of = replay, clock, seconds_of
        self._tells_generated = tells_generated

    async def admit(self, replica: str, max_groups: int) -> list[Admission]:
        await self._travel("admit")
        return [*await self._replay.admit(replica, max_groups)]

    async def generated(self, tries: Sequence[tuple[int, int]]) -> None:
        if self._tells_generated:
            await self._travel("generated")
            await self._replay.generated(tries)

    async def put(self, groups: Sequence[Group]) -> None:
        await self._travel("put")
        await self._replay.put(groups)

    async def end(self, index: int, outcome: str, reason: str, attempt: int) -> None:
        await self._travel("end")
        await self._replay.end(index, outcome, reason, attempt)

    async def trained(self, step: int) -> None:
        await self._travel("trained")
        await self._replay.trained(step)

    async def published(self, step: int) -> None:
        await self._travel("published")
        await self._replay.published(step)

    async def pulled(self, replica: str, step: int) -> None:
        await self._travel("pulled")
        await self._replay.pulled(replica, step)

    async def add_replica(self, replica: str, step: int) -> None:
        await self._travel("add_replica")
        await self._replay.add_replica(replica, step)

    async def remove_replica(self, replica: str) -> None:
        await self._travel("remove_replica")
        await self._replay.remove_replica(replica)

    async def set_max_staleness(self, max_staleness: int) -> None:
        await self._travel("set_max_staleness")
        await self._replay.set_max_staleness(max_staleness)

    async def state(self) -> dict[str, float]:
        await self._travel("state")
        return await self._replay.state()

    async def why(self) -> str:
        await self._travel("why")
        return await self._replay.why()

    async def close(self, reason: str) -> dict[str, float]:
        await self._travel("close")
        return await self._replay.close(reason)

    async def _travel(self, call: str) -> None:
        await self._clock.sleep(self._seconds_of(call))


class SimulatedWorkers:
    """Implements `Workers` with the product's GroupMaker."""

    def __init__(self, maker: GroupMaker, policies: dict[str, PolicyClient], sink: GroupSink) -> None:
        self._maker, self._policies, self._sink = maker, policies, sink

    async def make(self, admissions: Sequence[Admission], replica: str) -> list[GroupRecord]:
        return await make_and_hand_over(self._maker, admissions, self._policies[replica], replica, self._sink)

    async def evaluate(self, num_prompts: int, replica: str, name: str) -> None:
        return None

    async def stats(self) -> list[WorkerReport]:
        stats = self._maker.take_stats()
        return [WorkerReport(score_s=stats.score_s, spans=(), rss_bytes=0, cpu_s=0.0)]


class SimulatedWorld:
    """The parts of a run, connected. Its methods are called inside one event loop."""

    def __init__(self, plan: SimulatedPlan, clock: Clock, observer: Observer) -> None:
        self.plan, self.clock = plan, clock
        source = SimulatedSource(plan.num_prompts, plan.prompt_tokens)
        most_sequences = max(times.max_sequences for times in plan.engines)
        at_once = groups_at_once(len(plan.engines), most_sequences, plan.group_size)
        state = ReplayState(
            settings=plan.dials,
            groups_per_step=plan.groups_per_step,
            prompts=Prompts(source=source.name, epoch_size=len(source)),
            tokens_guess=plan.group_size * plan.prompt_tokens * 2,
            num_steps=plan.num_steps,
            groups_at_once=at_once,
        )
        self.replay = WaitingReplay(state, clock, plan.patience_s)
        ends = plan.num_steps if plan.dials.takes_ahead else 0
        self.learner = SimulatedLearner(self.replay, plan.learner, clock, ends)
        self.rewards = SimulatedRewards(plan.rewards, clock, plan.seed)
        self.replicas = [self.make_replica(f"policy_{number}", times) for number, times in enumerate(plan.engines)]
        self.policies: dict[str, PolicyClient] = {replica.name: replica for replica in self.replicas}
        self.calls = SimulatedCalls(self.replay, clock, plan.seconds_of, at_once is not None)
        self.workers = SimulatedWorkers(_maker(plan, source, self.rewards, clock), self.policies, self.calls)
        self.publisher = Publisher(self.learner, self.calls, plan.keep_versions, clock.now_s)
        settings = RingSettings(
            num_steps=plan.num_steps,
            groups_per_step=plan.groups_per_step,
            publish_every=plan.dials.publish_every,
        )
        self.ring = Ring(
            replay=self.calls,
            learner=self.learner,
            replicas=self.replicas,
            workers=self.workers,
            publisher=self.publisher,
            observer=observer,
            settings=settings,
        )

    def make_replica(self, name: str, times: EngineTimes, version: PolicyVersion | None = None) -> SimulatedReplica:
        """A replica that is not started."""
        plan = self.plan
        return SimulatedReplica(
            name,
            times=times,
            lengths_of=plan.lengths_of,
            swap=plan.dials.swap,
            clock=self.clock,
            version=version,
        )

    async def prepare(self) -> PolicyVersion:
        """Publish the first version and have every replica serve it, as a run does before its ring; returns it."""
        version = await self.learner.snapshot()
        await self.publisher.publish(version)
        await asyncio.gather(*(replica.start() for replica in self.replicas))
        for replica in self.replicas:
            await self.replay.add_replica(replica.name, version.step)
        return version

    async def run(self) -> PolicyVersion:
        """Prepare, run the ring to its last step, and end the replicas; returns the last version."""
        try:
            return await self.ring.run(await self.prepare())
        finally:
            self.learner.close()
            await asyncio.gather(*(replica.close() for replica in self.replicas))


def _maker(plan: SimulatedPlan, source: SimulatedSource, rewards: SimulatedRewards, clock: Clock) -> GroupMaker:
    renderer = SimulatedRenderer()
    return GroupMaker(
        source=source,
        renderer=renderer,
        rewards=rewards,
        sampling=Sampling(max_new_tokens=plan.max_new_tokens, stop_token_ids=renderer.stop_token_ids),
        group_size=plan.group_size,
        run_seed=plan.seed,
        advantage=AdvantageSettings(zero_variance=plan.zero_variance),
        rollout=RolloutSettings(linger_s=plan.linger_s, timeout_s=GROUP_TIMEOUT_S, group_timeout_s=GROUP_TIMEOUT_S),
        now_s=clock.now_s,
    )
