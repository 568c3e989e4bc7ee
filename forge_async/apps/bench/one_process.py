"""Whole training runs in one process, one after the other on one engine: the real parts, taking turns.

Replay, group making, engine, rewards, learner and weights are those of `apps.grpo`, without actors and without overlap:
the engine makes every group that the replay room admits, then the learner takes its step and its weights are loaded. So
each token is as old as the bound allows from step S on, whatever the machine does meanwhile, and equal seeds give equal
runs. What is not here are swaps in the middle of a rollout.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.config import Config
from forge_async.core.garbage import settle_heap
from forge_async.core.records import Group
from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import split_batch
from forge_async.learner.layout import Layout
from forge_async.learner.ports import StepResult
from forge_async.pipeline.evaluate import Evaluator
from forge_async.pipeline.hand_over import make_and_hand_over
from forge_async.pipeline.make_groups import GroupMaker
from forge_async.pipeline.ports import EvalScores
from forge_async.policy.local import LocalPolicy
from forge_async.policy.ports import Engine
from forge_async.policy.service import RequestService
from forge_async.replay.admission import Prompts
from forge_async.replay.state import ReplayState
from forge_async.replay.waiting import WaitingReplay
from forge_async.reward.pool import ProcessRewardPool
from forge_async.rollout.oversize import SampleLimit
from forge_async.weights.manifest import Packed, build_manifest
from forge_async.weights.packing import unpack

if TYPE_CHECKING:
    from forge_async.backends.tasks import OpenTask
    from forge_async.backends.titan_learner import TitanLearner

REPLICA = "policy_0"
BATCH_TIMEOUT_S = 60.0
"""A batch is whole before it is asked for; a wait means that no group was left to be admitted."""


@dataclass(slots=True, kw_only=True)
class Course:
    """How a run went."""

    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's batch."""
    ages: list[float] = field(default_factory=list)
    """Mean age of each step's samples, in steps."""
    steps: list[StepResult] = field(default_factory=list)
    held_out: EvalScores | None = None
    """Of the last weights; None where the task holds nothing out, or `eval.num_prompts` is 0."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU seconds of this process; the reward's process is not counted."""


class OneProcess:
    """An engine and a reward process, kept for runs that differ in anything but model, engine and task."""

    def __init__(self, config: Config, model_folder: Path) -> None:
        """Build nothing yet; `config` is any of the runs'."""
        self._policy, self._folder, self._seed = config.policy, model_folder, config.root.seed
        self._service = RequestService(self._build_engine)
        self._rewards: ProcessRewardPool | None = None
        self._num_runs = 0
        """So far. Each has an incarnation of its own, since an engine never goes back to older weights."""

    async def start(self) -> None:
        """Build the engine."""
        # torch's rendezvous wants these even for a single process; the engine's own is joined.
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        await self._service.start()

    async def close(self) -> None:
        """End engine and rewards."""
        await self._service.close()
        if self._rewards is not None:
            await self._rewards.close()

    async def run(self, config: Config) -> Course:
        """Train from the model's folder to the last step."""
        begun_s, cpu_s, course = time.monotonic(), time.process_time(), Course()
        task = self._open(config)
        rewards = await self._reward_pool(task, config)
        maker, replay, learner = self._maker(config, task, rewards), _replay(config, task), self._learner(config)
        self._num_runs += 1
        await self._publish(learner)
        await replay.add_replica(REPLICA, learner.version.step)
        for step in range(config.root.steps):
            groups = await self._generated(replay, maker, config, step)
            course.steps.append(learner.train(_share(groups, config)))
            course.rewards.append(float(sum(group.rewards.mean() for group in groups) / len(groups)))
            course.ages.append(replay.inner.state()["staleness/mean"])
            await replay.trained(step)
            if (step + 1) % config.asynchrony.publish_every == 0:
                await self._publish(learner)
                await replay.published(learner.version.step)
                await replay.pulled(REPLICA, learner.version.step)
        await self._publish(learner)
        course.held_out = await self._held_out(config, task, rewards)
        course.wall_s, course.cpu_s = time.monotonic() - begun_s, time.process_time() - cpu_s
        return course

    async def _generated(self, replay: WaitingReplay, maker: GroupMaker, config: Config, step: int) -> list[Group]:
        """Make all that may be admitted, then take the batch."""
        policy = LocalPolicy(self._service)
        while admissions := replay.inner.admit(REPLICA, config.root.groups_per_step):
            await make_and_hand_over(maker, admissions, policy, REPLICA, replay)
        return await replay.take(step, BATCH_TIMEOUT_S)

    async def _publish(self, learner: TitanLearner) -> None:
        part, blob = learner.snapshot()
        weights = unpack(build_manifest(learner.version, [Packed(part=part)]), {0: blob})
        async with self._service.pulling():
            ready = await self._service.prepare(weights, learner.version)
            await self._service.swap(ready, learner.version)

    async def _held_out(self, config: Config, task: OpenTask, rewards: ProcessRewardPool) -> EvalScores | None:
        prompts = task.source.held_out(config.eval.num_prompts)
        if not prompts:
            return None
        evaluator = Evaluator(
            renderer=task.renderer,
            scorer=rewards,
            sampling=config.sampling.until(task.renderer.stop_token_ids),
            settings=config.eval,
            seed=0,  # the same draws for every run
        )
        return await evaluator.evaluate(prompts, LocalPolicy(self._service), "held out")

    def _open(self, config: Config) -> OpenTask:
        from forge_async.backends.tasks import open_task

        root = config.root
        return open_task(str(self._folder), config.task, prompts=root.prompts, reward=root.reward, seed=root.seed)

    async def _reward_pool(self, task: OpenTask, config: Config) -> ProcessRewardPool:
        if self._rewards is None:
            self._rewards = ProcessRewardPool(task.reward, timeout_s=config.root.reward_timeout_s)
            await self._rewards.start()
        return self._rewards

    def _maker(self, config: Config, task: OpenTask, rewards: ProcessRewardPool) -> GroupMaker:
        return GroupMaker(
            source=task.source,
            renderer=task.renderer,
            rewards=rewards,
            sampling=config.sampling.until(task.renderer.stop_token_ids),
            group_size=config.root.group_size,
            run_seed=config.root.seed,
            advantage=config.advantage,
            rollout=config.rollout,
            limit=SampleLimit(max_tokens=config.learner.max_sample_tokens, rule=config.learner.oversize),
        )

    def _learner(self, config: Config) -> TitanLearner:
        from forge_async.backends.titan_learner import TitanLearner
        from forge_async.learner.loss import objective_loss

        return TitanLearner(
            self._folder,
            loss=objective_loss(config.whole_objective(), config.asynchrony.correction, config.correction),
            learner=config.learner,
            optimizer=config.optimizer,
            total_steps=config.root.steps,
            seed=config.root.seed,
            temperature=config.sampling.temperature,
            publish_dtype=config.policy.dtype,
            version=PolicyVersion(incarnation=self._num_runs),
        )

    def _build_engine(self) -> Engine:
        from forge_async.backends.vllm_engine import VllmEngine

        engine = VllmEngine(str(self._folder), self._policy, PolicyVersion(), self._seed)
        settle_heap()  # as in a policy's own process
        return engine


def _replay(config: Config, task: OpenTask) -> WaitingReplay:
    state = ReplayState(
        settings=config.asynchrony,
        groups_per_step=config.root.groups_per_step,
        prompts=Prompts(source=task.source.name, epoch_size=len(task.source)),
        tokens_guess=config.root.group_size * config.policy.max_model_tokens // 2,
        num_steps=config.root.steps,
    )
    return WaitingReplay(state)


def _share(groups: Sequence[Group], config: Config) -> Any:
    keep = config.advantage.zero_variance == "keep" or config.objective.trains_zero_advantages
    return split_batch(groups, 1, keep_zero_advantage=keep, layout=Layout.of(config.learner))[0]


class Runs:
    """A process's engine, started with its first run. For code that is no coroutine."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()
        self._engine: OneProcess | None = None

    def run(self, config: Config, model_folder: Path) -> Course:
        """One run. Raises ForgeError where a part failed."""
        if self._engine is None:
            self._engine = OneProcess(config, model_folder)
            self._loop.run(self._engine.start())
        return self._loop.run(self._engine.run(config))

    def close(self) -> None:
        """End what was started."""
        if self._engine is not None:
            self._loop.run(self._engine.close())
        self._loop.close()
