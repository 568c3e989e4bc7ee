"""A run from its first version to its last: publish what was loaded, evaluate, run the ring, evaluate, save."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import Learner, Replay, Replica, Workers
from forge_async.pipeline.publish import Publisher
from forge_async.pipeline.recorder import Recorder
from forge_async.pipeline.ring import Ring, RingSettings
from forge_async.pipeline.settings import CheckpointSettings, EvalSettings
from forge_async.pipeline.watchdog import Watchdog


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run reached; filled in as it goes, so that a failed run keeps what it had."""

    eval_before: float | None = None
    eval_after: float | None = None
    weights_sha256: str | None = None
    checkpoint: Path | None = None
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
        checkpoints_folder: Path,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._replay, self._learner, self._replicas, self._workers = replay, learner, replicas, workers
        self._recorder, self._evaluation, self._checkpoint = recorder, evaluation, checkpoint
        self._folder = checkpoints_folder
        self._watchdog = watchdog or Watchdog()
        self._publisher = Publisher(learner, replay, keep_versions)
        self._ring = Ring(
            replay=replay,
            learner=learner,
            replicas=replicas,
            workers=workers,
            publisher=self._publisher,
            observer=recorder,
            settings=ring,
            after_step=self._after_step,
            watchdog=self._watchdog,
        )
        self._num_steps = ring.num_steps
        self.result = RunResult()

    async def prepare(self) -> PolicyVersion:
        """Publish the loaded model and have every replica serve it; returns its version."""
        version = await self._learner.snapshot()
        await self._publisher.publish(version)
        await asyncio.gather(*(self._publisher.pull(replica, version) for replica in self._replicas))
        self.result.eval_before = await self._evaluate("before")
        for replica in self._replicas:
            await self._replay.add_replica(replica.name, version.step)
        return version

    async def train(self, version: PolicyVersion) -> None:
        """Run the ring to its last step, then evaluate and save what it reached."""
        async with asyncio.TaskGroup() as group:
            beside = [
                group.create_task(self._recorder.run(), name="recorder"),
                group.create_task(self._watchdog.run(), name="watchdog"),
            ]
            await self._ring.run(version)
            for task in beside:
                task.cancel()
        await self._recorder.finish("the run ended")
        self.result.groups = _totals(await self._replay.state())
        self.result.eval_after = await self._evaluate("after")
        await self._save(self._num_steps)
        self.result.weights_sha256 = await self._learner.digest()

    async def _after_step(self, done: int) -> None:
        if done == self._num_steps:
            return
        if self._evaluation.every_steps and done % self._evaluation.every_steps == 0:
            score = await self._evaluate(f"step {done}")
            if score is not None:
                self._recorder.evaluated(done + 1, score)
        if self._checkpoint.every_steps and done % self._checkpoint.every_steps == 0:
            await self._save(done)

    async def _evaluate(self, name: str) -> float | None:
        if not self._evaluation.num_prompts:
            return None
        score, _ = await self._workers.evaluate(self._evaluation.num_prompts, self._replicas[0].name, f"eval {name}")
        return None if math.isnan(score) else score

    async def _save(self, done: int) -> None:
        folder = self._folder / f"step-{done:06d}"
        await self._learner.save(str(folder))
        self.result.checkpoint = folder
        for old in sorted(self._folder.glob("step-*"))[: -self._checkpoint.keep]:
            await asyncio.to_thread(_remove, old)


def _remove(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _totals(state: dict[str, float]) -> dict[str, int]:
    names = ("admitted", "trained", "filtered", "failed", "expired", "cancelled")
    return {name: int(state[f"groups/{name}"]) for name in names}
