"""Actor handles as the pipeline's ports, and the start of all actors of a run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forge_async.actors.forge_actor import ActorHandle
from forge_async.actors.learner_actor import LearnerActor, LearnerPlan
from forge_async.actors.policy_actor import PolicyActor
from forge_async.actors.reference_actor import ReferenceActor, ReferencePlan
from forge_async.actors.replay_actor import ReplayActor
from forge_async.actors.rollout_actor import RolloutActor, RolloutPlan
from forge_async.actors.store_actor import StoreActor
from forge_async.config.schema import Config
from forge_async.core.compact import Records
from forge_async.core.versions import PolicyVersion
from forge_async.learner.layout import Layout
from forge_async.pipeline.ports import Admission, EvalScores, GroupRecord, LearnerStep, Pull, ReplicaStats, WorkerReport
from forge_async.pipeline.worker_reports import WorkerReports
from forge_async.replay.admission import Prompts
from forge_async.replay.generating import groups_at_once
from forge_async.rollout.oversize import SampleLimit
from forge_async.runtime.meshes import Placement
from forge_async.runtime.resume import JOURNAL, ResumePoint
from forge_async.runtime.start_watch import Watch, watched_start
from forge_async.runtime.store import RunningStore
from forge_async.weights.retention import Committed


class RemoteReplica:
    """A policy replica's actor as the loops see it."""

    def __init__(self, name: str, handle: ActorHandle, timeout_s: float, weights_timeout_s: float) -> None:
        self.name, self._handle = name, handle
        self._timeout_s, self._weights_timeout_s = timeout_s, weights_timeout_s

    async def pull(self, version: PolicyVersion) -> Pull:
        return await self._handle.pull.call_one(version, timeout_s=self._weights_timeout_s)

    async def stats(self) -> ReplicaStats:
        return await self._handle.stats.call_one(timeout_s=self._timeout_s)

    async def score(self, token_ids: np.ndarray) -> tuple[PolicyVersion, np.ndarray]:
        return await self._handle.score.call_one(token_ids, timeout_s=self._timeout_s)


class RemoteWorkers:
    """The rollout workers' actors as one; each call goes to the next of them."""

    def __init__(self, handles: Sequence[ActorHandle], timeout_s: float) -> None:
        self._handles, self._timeout_s = handles, timeout_s
        self._turn = itertools.cycle(range(len(handles)))
        self._reports = WorkerReports()

    async def make(self, admissions: Sequence[Admission], replica: str) -> list[GroupRecord]:
        worker = next(self._turn)
        records, report = await self._handles[worker].make.call_one(Records(admissions), replica)
        self._reports.note(worker, report)
        return records

    async def evaluate(self, num_prompts: int, replica: str, name: str) -> EvalScores | None:
        worker = self._handles[0]
        return await worker.evaluate.call_one(num_prompts, replica, name, timeout_s=self._timeout_s)

    async def stats(self) -> list[WorkerReport]:
        return list(await asyncio.gather(*(self._stats(worker) for worker in range(len(self._handles)))))

    async def _stats(self, worker: int) -> WorkerReport:
        if (report := self._reports.take(worker)) is not None:
            return report
        return self._reports.take_with(worker, await self._handles[worker].stats.call_one(timeout_s=self._timeout_s))


class RemoteReplay:
    """The replay actor as the loops see it."""

    def __init__(self, handle: ActorHandle, timeout_s: float) -> None:
        self._handle, self._timeout_s = handle, timeout_s

    async def add_replica(self, replica: str, step: int) -> None:
        await self._handle.add_replica.call_one(replica, step)

    async def admit(self, replica: str, max_groups: int) -> Sequence[Admission]:
        return await self._handle.admit.call_one(replica, max_groups, self._timeout_s)

    async def trained(self, step: int) -> None:
        await self._handle.trained.call_one(step)

    async def published(self, step: int) -> None:
        await self._handle.published.call_one(step)

    async def pulled(self, replica: str, step: int) -> None:
        await self._handle.pulled.call_one(replica, step)

    async def set_max_staleness(self, max_staleness: int) -> None:
        await self._handle.set_max_staleness.call_one(max_staleness)

    async def state(self) -> dict[str, float]:
        return await self._handle.state.call_one()

    async def why(self) -> str:
        return await self._handle.why.call_one()

    async def close(self, reason: str) -> dict[str, float]:
        return await self._handle.close.call_one(reason)


class RemoteLearner:
    """The learner's ranks as one."""

    def __init__(self, handle: ActorHandle, timeout_s: float, weights_timeout_s: float) -> None:
        self._handle, self._timeout_s, self._weights_timeout_s = handle, timeout_s, weights_timeout_s

    async def step(self, step: int, snapshot: bool) -> list[LearnerStep]:
        # The wait for a batch has the same limit inside, and says more when it ends; the step itself comes on top.
        return await self._handle.step.call_ranks(step, snapshot, self._timeout_s, timeout_s=2 * self._timeout_s + 5)

    async def snapshot(self) -> PolicyVersion:
        return (await self._handle.snapshot.call_ranks(timeout_s=self._timeout_s))[0]

    async def stage(self, version: PolicyVersion) -> None:
        if len(self._handle.processes) == 1:
            return  # the one rank that commits it stages it in the same call
        await self._handle.stage.call_ranks(version, timeout_s=self._weights_timeout_s)

    async def restage(self, version: PolicyVersion) -> None:
        await self._handle.restage.call_ranks(version, timeout_s=self._weights_timeout_s)

    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        return await self._first.commit.call_one(version, retire, timeout_s=self._weights_timeout_s)

    async def retire(self, version: PolicyVersion) -> None:
        await self._first.retire.call_one(version, timeout_s=self._weights_timeout_s)

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return (await self._handle.score.call_ranks(token_ids, timeout_s=self._timeout_s))[0]

    async def save(self, folder: str) -> None:
        await self._handle.save.call_ranks(folder, timeout_s=self._timeout_s)

    async def save_state(self, folder: str) -> None:
        await self._handle.save_state.call_ranks(folder, timeout_s=self._timeout_s)

    async def digest(self) -> str:
        return (await self._handle.digest.call_ranks(timeout_s=self._timeout_s))[0]

    @property
    def _first(self) -> ActorHandle:
        return self._handle.rank(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actors:
    """Everything that a run started, as ports, and the handles behind them."""

    replay: RemoteReplay
    learner: RemoteLearner
    replicas: tuple[RemoteReplica, ...]
    workers: RemoteWorkers
    store: RunningStore
    """Which may be replaced when it dies."""
    handles: tuple[ActorHandle, ...]
    """All the others, to be watched: the run ends with the first that dies."""
    silent_pids: dict[str, int]
    """Processes of this machine that report no memory and CPU time of their own, by name."""
    version: PolicyVersion
    """What the learner loaded."""


async def start_actors(
    config: Config,
    model_folder: Path,
    placement: Placement,
    run_dir: Path,
    on_ready: Callable[[str, float], None],
    resume: ResumePoint | None = None,
) -> Actors:
    """Start every actor of a run together and connect them. `on_ready(name, seconds)` is told of each.

    `resume` is where the run goes on, if it does. Raises ActorDiedError as soon as one of them dies meanwhile.
    """
    return await watched_start(
        lambda watch: _start_actors(config, model_folder, placement, run_dir, on_ready, resume, watch)
    )


async def _start_actors(
    config: Config,
    model_folder: Path,
    placement: Placement,
    run_dir: Path,
    on_ready: Callable[[str, float], None],
    resume: ResumePoint | None,
    watch: Watch,
) -> Actors:
    begun = time.monotonic()

    async def ready(name: str, starting: Awaitable[ActorHandle]) -> ActorHandle:
        handle = await starting
        watch(handle.watch.wait_for_death)
        on_ready(name, time.monotonic() - begun)
        return handle

    limits = {"start_timeout_s": config.run.start_timeout_s, "stop_timeout_s": config.run.stop_timeout_s}
    names = [f"policy_{number}" for number in range(config.policy.replicas)]
    async with asyncio.TaskGroup() as group:
        policies = [
            group.create_task(ready(name, _start_policy(name, number, config, model_folder, placement, limits)))
            for number, name in enumerate(names)
        ]
        learner = group.create_task(ready("learner", _start_learner(config, model_folder, placement, limits, resume)))
        references = [
            group.create_task(ready("reference", _start_reference(config, model_folder, placement, limits)))
            for _ in range(config.reference.is_service)
        ]
        rollouts = [
            group.create_task(
                ready(f"rollout_{number}", _start_rollout(number, config, model_folder, placement, limits))
            )
            for number in range(config.rollout.workers)
        ]
        store = group.create_task(ready("store", _start_store(config, placement, run_dir, limits)))
    replicas = {name: task.result() for name, task in zip(names, policies, strict=True)}
    workers = [task.result() for task in rollouts]
    # The replay actor needs to know the size of an epoch, which the prompt source tells; it starts in a second.
    source, epoch_size = await workers[0].source.call_one()
    prompts = Prompts(source=source, epoch_size=epoch_size)
    replay = await _start_replay(config, placement, run_dir, prompts, limits, resume)
    watch(replay.watch.wait_for_death)
    started = _Started(
        store=store.result(),
        learner=learner.result(),
        replicas=replicas,
        workers=workers,
        reference=[task.result() for task in references],
        replay=replay,
    )
    return await _connect(config, started, lambda: _start_store(config, placement, run_dir, limits))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Started:
    """The actors of a run, before they know of each other."""

    store: ActorHandle
    learner: ActorHandle
    replicas: Mapping[str, ActorHandle]
    workers: Sequence[ActorHandle]
    reference: Sequence[ActorHandle]
    """The reference service, if there is one."""
    replay: ActorHandle


async def _connect(config: Config, started: _Started, start_store: Callable[[], Awaitable[ActorHandle]]) -> Actors:
    """Tell the actors of each other; `start_store` starts another store, should that one die."""
    store, learner, replicas, workers = started.store, started.learner, dict(started.replicas), started.workers
    reference, replay = started.reference, started.replay
    store_handle = await store.handle.call_one()
    version, *_ = await learner.connect.call(store_handle, replay)
    first_rank = reference[0].rank(0) if reference else None
    await asyncio.gather(
        *(handle.connect.call_one(store_handle) for handle in replicas.values()),
        *(worker.connect.call_one(replicas, replay, first_rank) for worker in workers),
    )
    ranks = await asyncio.gather(*(handle.ranks.call_one() for handle in replicas.values()))
    deadline, weights_deadline = config.run.step_timeout_s, config.weights.timeout_s
    return Actors(
        replay=RemoteReplay(replay, deadline),
        learner=RemoteLearner(learner, deadline, weights_deadline),
        replicas=tuple(RemoteReplica(name, handle, deadline, weights_deadline) for name, handle in replicas.items()),
        workers=RemoteWorkers(workers, deadline),
        store=RunningStore(store, start_store, learner, tuple(replicas.values()), config.weights.timeout_s),
        handles=(*filter(None, ranks), learner, *reference, *replicas.values(), *workers, replay),
        silent_pids=_silent_pids([store, replay, *reference, *filter(None, ranks)]),
        version=version,
    )


def _silent_pids(handles: Sequence[ActorHandle]) -> dict[str, int]:
    return {
        f"{handle.name}_{process.rank}" if len(handle.processes) > 1 else handle.name: process.pid
        for handle in handles
        for process in handle.processes
        if process.is_local
    }


async def _start_store(config: Config, placement: Placement, run_dir: Path, limits: dict) -> ActorHandle:
    options = StoreActor.options(
        mesh_name="store", hosts=placement.controller, shared_gpus=config.weights.gpus, **limits
    )
    return await options.as_actor(config.weights, str(run_dir / "weights"))


async def _start_policy(name: str, number: int, config: Config, folder: Path, placement: Placement, limits: dict):
    hosts, with_gpus = placement.policy.one(number), config.job.gpus_per_host > 0
    options = PolicyActor.options(
        mesh_name=name,
        hosts=hosts,
        with_gpus=with_gpus,
        gpus_each=config.policy.tensor_parallel,
        shared_gpus=config.weights.gpus,
        **limits,
    )
    settings, seed = (config.policy, config.weights, PolicyVersion()), config.root.seed
    adapters = {"lora": config.travelling_lora(), "adapters_held": config.adapters_held()}
    return await options.as_actor(
        name, str(folder), *settings, seed, swap=config.asynchrony.swap, hosts=hosts, **adapters
    )


async def _start_learner(
    config: Config, folder: Path, placement: Placement, limits: dict, resume: ResumePoint | None
) -> ActorHandle:
    hosts, plan = placement.learner, LearnerPlan.of(config, str(folder))
    if resume is not None:
        plan = replace(plan, version=resume.version, state_folder=resume.state_folder)
    options = LearnerActor.options(
        mesh_name="learner",
        hosts=hosts,
        procs=config.learner.ranks // hosts.num_hosts,
        spmd=True,
        with_gpus=config.job.gpus_per_host > 0,
        shared_gpus=config.weights.gpus,
        **limits,
    )
    return await options.as_actor(plan)


async def _start_reference(config: Config, folder: Path, placement: Placement, limits: dict) -> ActorHandle:
    hosts = placement.reference
    options = ReferenceActor.options(
        mesh_name="reference",
        hosts=hosts,
        procs=config.reference.ranks // hosts.num_hosts,
        spmd=True,
        with_gpus=config.job.gpus_per_host > 0,
        **limits,
    )
    handle = await options.as_actor(ReferencePlan.of(config, str(folder)))
    await handle.rank(0).connect.call_one(handle)
    return handle


def _groups_at_once(config: Config) -> int | None:
    policy = config.policy
    most = (
        min(policy.max_sequences, int(policy.concurrency)) if policy.concurrency.isdecimal() else policy.max_sequences
    )
    return groups_at_once(policy.replicas, most, config.root.group_size)


async def _start_rollout(number: int, config: Config, folder: Path, placement: Placement, limits: dict) -> ActorHandle:
    plan = RolloutPlan(
        model_folder=str(folder),
        prompts=config.root.prompts,
        task=config.task,
        reward=config.root.reward,
        reward_timeout_s=config.root.reward_timeout_s,
        sampling=config.sampling,
        advantage=config.advantage,
        rollout=config.rollout,
        group_size=config.root.group_size,
        seed=config.root.seed,
        max_model_tokens=config.policy.max_model_tokens,
        evaluation=config.eval,
        limit=SampleLimit(max_tokens=config.learner.max_sample_tokens, rule=config.learner.oversize),
        reference_timeout_s=config.reference.timeout_s if config.reference.is_service else None,
        tells_generated=_groups_at_once(config) is not None,
    )
    options = RolloutActor.options(mesh_name=f"rollout_{number}", hosts=placement.controller, **limits)
    return await options.as_actor(plan)


async def _start_replay(
    config: Config, placement: Placement, run_dir: Path, prompts: Prompts, limits: dict, resume: ResumePoint | None
) -> ActorHandle:
    guess = config.root.group_size * config.policy.max_model_tokens // 2
    options = ReplayActor.options(mesh_name="replay", hosts=placement.controller, **limits)
    return await options.as_actor(
        config.asynchrony,
        groups_per_step=config.root.groups_per_step,
        num_steps=config.root.steps,
        groups_at_once=_groups_at_once(config),
        prompts=prompts,
        tokens_guess=guess,
        journal_path=str(run_dir / "journal" / JOURNAL),
        resume_from=resume.version if resume else None,
        keep_zero_advantage=config.advantage.zero_variance == "keep" or config.objective.trains_zero_advantages,
        layout=Layout.of(config.learner),
    )
