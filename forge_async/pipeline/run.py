"""A run from its first version to its last: publish what was loaded, evaluate, run the ring, save, evaluate."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.auto_bound import AutoBound
from forge_async.pipeline.checkpoints import Checkpoints
from forge_async.pipeline.evaluations import Evaluated, Evaluations
from forge_async.pipeline.no_signal import NoSignal
from forge_async.pipeline.observers import Observers
from forge_async.pipeline.ports import Learner, Replay, Replica, Workers
from forge_async.pipeline.publish import Publisher
from forge_async.pipeline.recorder import Recorder
from forge_async.pipeline.ring import Ring, RingSettings
from forge_async.pipeline.run_state import RunState
from forge_async.pipeline.settings import CheckpointSettings, EvalSettings
from forge_async.pipeline.store_keeper import StoreKeeper
from forge_async.pipeline.watchdog import Watchdog
from forge_async.replay.auto_staleness import AutoStaleness


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run reached; filled in as it goes, so that a failed run keeps what it had."""

    eval_before: float | None = None
    eval_after: float | None = None
    evaluations: list[Mapping[str, Any]] = field(default_factory=list)
    """All of them as the summary tells them, in the order in which they ended."""
    weights_sha256: str | None = None
    checkpoint: Path | None = None
    """The newest one."""
    best_checkpoint: Path | None = None
    """The one where the best evaluation after the first step began."""
    groups: dict[str, int] | None = None


class Run:
    """One run over actors that are started and connected."""

    def __init__(
        self,
        *,
        replay: Replay,
        learner: Learner,
        replicas: Sequence[Replica],
        workers: Workers,
        recorder: Recorder,
        ring: RingSettings,
        evaluation: EvalSettings,
        checkpoint: CheckpointSettings,
        keep_versions: int,
        store: StoreKeeper | None = None,
        checkpoints_folder: Path,
        watchdog: Watchdog | None = None,
        evaluate_beside: bool = True,
        max_fruitless_steps: int = sys.maxsize,
        auto: AutoStaleness | None = None,
        say: Callable[[str], None] = lambda text: None,
        begun_s: float = 0.0,
        resumed: RunState | None = None,
    ) -> None:
        """`auto` moves the bound on age as the run's stages ask for; `say` is told of each move.

        `store` has the weight store's death mended while `keep_store` runs; None: what fails there ends the run.

        `evaluate_beside` lets the loops go on during an evaluation.

        At S = 0 they must not: other requests in the engine change the last bits of log-probabilities (Law 3).

        `begun_s` is the wall clock at which the run began, so to speak: what it took counts from there. `resumed` is
        the checkpoint that the learner began with, if the run goes on from one.
        """
        self._replay, self._learner, self._replicas, self._workers = replay, learner, replicas, workers
        self._recorder, self._save_every = recorder, checkpoint.every_steps
        self._eval_every, self._evaluate_beside = evaluation.every_steps * (evaluation.num_prompts > 0), evaluate_beside
        self._evaluations = Evaluations(workers, replicas, num_prompts=evaluation.num_prompts, observe=self._evaluated)
        self._beside: asyncio.TaskGroup | None = None
        self._checkpoints = Checkpoints(
            learner, checkpoints_folder, keep=checkpoint.keep, keep_best=checkpoint.keep_best
        )
        self._watchdog = watchdog or Watchdog()
        self._auto, self._say = AutoBound(auto) if auto else None, say
        self._store, self._publisher = store, Publisher(learner, replay, keep_versions, store=store)
        self._ring = Ring(
            replay=replay,
            learner=learner,
            replicas=replicas,
            workers=workers,
            publisher=self._publisher,
            observer=Observers(recorder, NoSignal(max_fruitless_steps), *([self._auto] if self._auto else [])),
            settings=ring,
            after_step=self._after_step,
            watchdog=self._watchdog,
        )
        self._num_steps, self._begun_s, self._resumed = ring.num_steps, begun_s, resumed
        self.result = RunResult()
        if resumed is not None:
            self._checkpoints.recall(resumed)
            self.result.eval_before, self.result.evaluations = resumed.eval_before, list(resumed.evaluations)
            self.result.best_checkpoint = self._checkpoints.best

    async def keep_store(self) -> None:
        """Have a store that dies replaced; ends only by cancellation, or with the death that is one too many."""
        if self._store is not None:
            await self._store.run(self._publisher.republish)

    async def prepare(self) -> PolicyVersion:
        """Publish the loaded model and have every replica serve it; returns its version."""
        version = await self._learner.snapshot()
        await self._publisher.publish(version)
        await asyncio.gather(*(self._publisher.pull(replica, version) for replica in self._replicas))
        await self._evaluate_first(version.step)
        for replica in self._replicas:
            await self._replay.add_replica(replica.name, version.step)
        return version

    async def train(self, version: PolicyVersion) -> None:
        """Run the ring to its last step, then evaluate and save what it reached."""
        async with asyncio.TaskGroup() as group:
            self._beside = group
            beside = [
                group.create_task(self._recorder.run(), name="recorder"),
                group.create_task(self._watchdog.run(), name="watchdog"),
            ]
            await self._ring.run(version)
            await self._evaluations.finish()
            for task in beside:
                task.cancel()
        await self._recorder.finish("the run ended")
        self.result.groups = _totals(await self._replay.state())
        await self._save(self._num_steps)
        self.result.eval_after = await self._score(self._num_steps)
        await self._checkpoints.prune()
        self.result.weights_sha256 = await self._learner.digest()

    async def _evaluate_first(self, done: int) -> None:
        """Evaluate the model that the run begins with; on the way, only what the checkpoint came too early for."""
        if self._resumed is None:
            self.result.eval_before = await self._score(done)
        elif self._is_evaluated(done) and not self._resumed.has_evaluated(done):
            await self._evaluations.evaluate(done)

    def _is_evaluated(self, done: int) -> bool:
        return bool(self._eval_every) and done % self._eval_every == 0

    async def _after_step(self, done: int) -> None:
        if self._auto is not None and (move := self._auto.take_move()):
            await self._replay.set_max_staleness(move.max_staleness)
            self._say(move.why)
        if done == self._num_steps:
            return
        evaluates = self._is_evaluated(done)
        saves = bool(self._save_every) and done % self._save_every == 0
        if saves or (evaluates and self._checkpoints.keep_best):
            await self._save(done)
        if evaluates:
            if self._evaluate_beside and self._beside is not None:
                self._evaluations.begin(self._beside, done)
            else:
                await self._evaluations.evaluate(done)

    async def _score(self, step: int) -> float | None:
        found = await self._evaluations.evaluate(step)
        return found.score if found else None

    def _evaluated(self, found: Evaluated) -> None:
        self.result.evaluations.append(found.record())
        self._recorder.evaluated(found)
        self._checkpoints.judge(found.step, found.score)
        self.result.best_checkpoint = self._checkpoints.best

    async def _save(self, done: int) -> None:
        """Write a checkpoint, after the records of all steps before: a resumed run goes on with both."""
        await self._recorder.settled()
        await self._ring.noted()
        best_step, best_score = self._checkpoints.best_known
        state = RunState(
            step=done,
            wall_s=time.time() - self._begun_s,
            eval_before=self.result.eval_before,
            evaluations=tuple(self.result.evaluations),
            best_step=best_step,
            best_score=best_score,
        )
        self.result.checkpoint = await self._checkpoints.save(state, self._evaluations.running_steps)


def _totals(state: dict[str, float]) -> dict[str, int]:
    names = ("admitted", "trained", "filtered", "failed", "expired", "cancelled")
    return {name: int(state[f"groups/{name}"]) for name in names}
