"""A rollout worker: prompts, turns and rewards for groups, on whichever replica it is told to use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_async.actors.forge_actor import ActorHandle, ForgeActor, concurrent_endpoint
from forge_async.core.compact import Records
from forge_async.core.errors import ForgeError
from forge_async.core.records import Group, Prompt, Samples
from forge_async.observe.process_stats import own_stats
from forge_async.pipeline.evaluate import Evaluator
from forge_async.pipeline.hand_over import make_and_hand_over
from forge_async.pipeline.make_groups import GroupMaker
from forge_async.pipeline.ports import Admission, EvalScores, GroupRecord, WorkerReport
from forge_async.pipeline.settings import EvalSettings
from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.policy.settings import SamplingSettings
from forge_async.prompt.ports import PromptSource, Renderer
from forge_async.prompt.settings import TaskSettings
from forge_async.reward.pool import ProcessRewardPool
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.oversize import SampleLimit
from forge_async.rollout.settings import RolloutSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """All that a rollout worker is built from."""

    model_folder: str
    prompts: str
    """A .jsonl file, or "" for the task's own."""
    task: TaskSettings
    reward: str
    """Reference of the reward function, or "" for the task's own."""
    reward_timeout_s: float
    sampling: SamplingSettings
    advantage: AdvantageSettings
    rollout: RolloutSettings
    group_size: int
    seed: int
    max_model_tokens: int
    """Longest prompt and completion that the engine takes."""
    evaluation: EvalSettings = field(default_factory=EvalSettings)
    limit: SampleLimit = field(default_factory=SampleLimit)
    """What the learner takes."""
    reference_timeout_s: float | None = None
    """As `reference.timeout_s`; None: no reference service scores what is to be trained on."""
    tells_generated: bool = False
    """Whether the replay actor wants to know of groups before they are scored."""


class RolloutActor(ForgeActor):
    """Makes groups and hands them to the replay actor; tokens never pass through the controller."""

    def __init__(self, plan: RolloutPlan) -> None:
        self._plan = plan
        self._replicas: dict[str, _RemotePolicy] = {}
        self._replay: _RemoteSink | None = None
        timeout_s = plan.reference_timeout_s
        self._reference = None if timeout_s is None else _RemoteReference(timeout_s)
        self._exact: ProcessRewardPool | None = None

    async def setup(self) -> None:
        from forge_async.backends.tasks import check_prompts_fit, open_task

        plan = self._plan
        task = open_task(plan.model_folder, plan.task, prompts=plan.prompts, reward=plan.reward, seed=plan.seed)
        check_prompts_fit(task, plan.sampling.max_new_tokens, plan.max_model_tokens)
        self._source: PromptSource = task.source
        self._renderer: Renderer = task.renderer
        self._sampling = plan.sampling.until(task.renderer.stop_token_ids)
        self._rewards = ProcessRewardPool(
            task.reward, num_workers=plan.rollout.reward_workers, timeout_s=plan.reward_timeout_s
        )
        if task.exact:
            self._exact = ProcessRewardPool(task.exact, timeout_s=plan.reward_timeout_s)
        await asyncio.gather(self._rewards.start(), *([self._exact.start()] if self._exact else []))
        self._maker = GroupMaker(
            source=self._source,
            renderer=self._renderer,
            rewards=self._rewards,
            sampling=self._sampling,
            group_size=plan.group_size,
            run_seed=plan.seed,
            advantage=plan.advantage,
            rollout=plan.rollout,
            limit=plan.limit,
            reference=self._reference,
        )

    async def teardown(self) -> None:
        await self._rewards.close()
        if self._exact is not None:
            await self._exact.close()

    @concurrent_endpoint
    async def source(self) -> tuple[str, int]:
        """The prompt source's name and the size of its epoch."""
        return self._source.name, len(self._source)

    @concurrent_endpoint
    async def connect(
        self, replicas: dict[str, ActorHandle], replay: ActorHandle, reference: ActorHandle | None = None
    ) -> None:
        """Learn who generates, who keeps groups, and who is the first rank of the reference service."""
        self._replicas = {name: _RemotePolicy(handle) for name, handle in replicas.items()}
        self._replay = _RemoteSink(replay, self._plan.tells_generated)
        if self._reference is not None:
            self._reference.handle = reference

    @concurrent_endpoint
    async def make(self, admissions: Sequence[Admission], replica: str) -> tuple[list[GroupRecord], WorkerReport]:
        """Make groups on a replica, hand them over as they are done, and return a small record of each and `stats`."""
        if self._replay is None:
            raise ForgeError("The rollout worker is not connected.")
        policy = self._replicas[replica]
        records = await make_and_hand_over(self._maker, admissions, policy, replica, self._replay)
        return Records(records), self._report()

    @concurrent_endpoint
    async def evaluate(self, num_prompts: int, replica: str, name: str) -> EvalScores | None:
        """Have a replica answer at most `num_prompts` held-out prompts; None when there are none."""
        prompts: list[Prompt] = self._source.held_out(num_prompts)
        if not prompts:
            return None
        evaluator = Evaluator(
            renderer=self._renderer,
            scorer=self._exact or self._rewards,
            sampling=self._sampling,
            settings=self._plan.evaluation,
            seed=self._plan.seed,
        )
        return await evaluator.evaluate(prompts, self._replicas[replica], name)

    @concurrent_endpoint
    async def stats(self) -> WorkerReport:
        """What happened since this was last told, here or with groups."""
        return self._report()

    def _report(self) -> WorkerReport:
        stats, own = self._maker.take_stats(), own_stats()
        return WorkerReport(
            score_s=stats.score_s,
            spans=tuple((*span, None) for span in stats.spans),
            rss_bytes=own.rss_bytes,
            cpu_s=own.cpu_s,
            num_cut=stats.num_cut,
            num_salvaged=stats.num_salvaged,
            num_oversize=stats.num_oversize,
            num_unknown_tokens=stats.num_unknown_tokens,
            reference_s=None if self._reference is None else stats.reference_s,
        )


class _RemotePolicy:
    """A replica's actor as a PolicyClient."""

    def __init__(self, handle: ActorHandle) -> None:
        self._handle = handle

    async def submit(
        self, ticket: str, requests: Sequence[GenerationRequest], linger_s: float
    ) -> tuple[list[GenerationResult], bool]:
        return await self._handle.submit.call_one(ticket, Records(requests), linger_s)

    async def collect(self, ticket: str, linger_s: float) -> tuple[list[GenerationResult], bool]:
        return await self._handle.collect.call_one(ticket, linger_s)

    async def cut(self, ticket: str) -> list[GenerationResult]:
        return await self._handle.cut.call_one(ticket)


class _RemoteReference:
    """The reference service's first rank as a Reference."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.handle: ActorHandle | None = None
        """Learnt when the worker is connected."""

    async def score(self, samples: Samples) -> Mapping[str, np.ndarray]:
        if self.handle is None:
            raise ForgeError("The rollout worker is not connected to the reference service.")
        return await self.handle.score.call_one(samples, timeout_s=self._timeout_s)


class _RemoteSink:
    """The replay actor as a GroupSink."""

    def __init__(self, handle: ActorHandle, tells_generated: bool) -> None:
        self._handle, self._tells_generated = handle, tells_generated

    async def generated(self, tries: Sequence[tuple[int, int]]) -> None:
        if self._tells_generated:
            await self._handle.generated.call_one(tries)

    async def put(self, groups: Sequence[Group]) -> None:
        await self._handle.put.call_one(Records(groups))

    async def end(self, index: int, outcome: str, reason: str, attempt: int) -> None:
        await self._handle.end.call_one(index, outcome, reason, attempt)
