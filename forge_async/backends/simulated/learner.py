"""A learner that sleeps instead of computing, and a store without bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_async.backends.simulated.times import LearnerTimes
from forge_async.core.clock import Clock
from forge_async.core.errors import LearnerError
from forge_async.core.records import Group, PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.learner.ports import StepResult
from forge_async.pipeline.batch_ahead import BatchAhead
from forge_async.pipeline.ports import LearnerStep
from forge_async.replay.ages import check_age
from forge_async.replay.waiting import PATIENCE_S, WaitingReplay
from forge_async.weights.retention import Committed

NUM_BYTES = 4
"""Of a version: one parameter of one element."""


class SimulatedLearner:
    """Implements the pipeline's `Learner` as one rank, which takes its batches from a replay in the same process."""

    def __init__(self, replay: WaitingReplay, times: LearnerTimes, clock: Clock, num_steps: int = 0) -> None:
        """`num_steps`: of the run, to take each batch while the step before is at work; 0: when its step begins."""
        self.version = PolicyVersion()
        self.trained: list[list[tuple[int, PromptId, int]]] = []
        """Admission index, prompt, and step of the oldest token, of each group of each step, as consumed."""
        self.busy_s = 0.0
        """Seconds of steps, the wait for the copy of the version before included."""
        self._copied_at_s = 0.0
        """When the copy of the parameters is done that the next change of them waits for."""
        self._replay, self._times, self._clock = replay, times, clock
        self._batches = BatchAhead(replay.take, end=num_steps, clock=clock)
        self._snapshots: set[PolicyVersion] = set()
        self._readable: set[PolicyVersion] = set()

    async def step(self, step: int, snapshot: bool) -> list[LearnerStep]:
        """Raises StalenessError for a group older than the bound, LearnerError for a step out of turn."""
        if step != self.version.step:
            raise LearnerError(f"Step {step} was asked of a learner at version {self.version.step}.")
        begun_s = self._clock.now_s()
        groups = await self._batches.take(step, PATIENCE_S)
        taken_s = self._clock.now_s()
        self._check_ages(groups, step)
        num_tokens = sum(group.samples.num_tokens for group in groups)
        await self._clock.sleep(self._times.step_s + num_tokens * self._times.token_s)
        await self._copied()
        trained_s = self._clock.now_s()
        self.version = self.version.next()
        self.trained.append([(group.index, group.prompt_id, group.oldest_step()) for group in groups])
        if snapshot:
            self._begin_copy()
        self.busy_s += trained_s - taken_s
        return [
            LearnerStep(
                result=_result(self.version, num_tokens, trained_s - taken_s),
                batch={"indices": [group.index for group in groups], **self._replay.inner.state()},
                wait_data_s=taken_s - begun_s,
                snapshot_s=0.0,
                snapshot_bytes=0,
                spans=(),
                rss_bytes=0,
                cpu_s=0.0,
            )
        ]

    def _check_ages(self, groups: Sequence[Group], step: int) -> None:
        """A second look, beside the replay room's own, which also knows the bound of each group."""
        highest = self._replay.inner.settings.highest_staleness
        if highest is not None:
            for group in groups:
                check_age(group, step, highest)

    def close(self) -> None:
        """Ask for no more batches."""
        self._batches.close()

    async def snapshot(self) -> PolicyVersion:
        self._begin_copy()
        await self._copied()
        return self.version

    async def stage(self, version: PolicyVersion) -> None:
        await self._copied()
        self._snapshots.remove(version)
        await self._clock.sleep(self._times.publish_s)

    async def restage(self, version: PolicyVersion) -> None:
        raise LearnerError(f"A simulated learner publishes every version whole, {version} too.")

    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        self._readable.add(version)
        self._readable -= set(retire)
        return Committed(num_bytes=NUM_BYTES)

    async def retire(self, version: PolicyVersion) -> None:
        self._readable.remove(version)

    def _begin_copy(self) -> None:
        self._copied_at_s = self._clock.now_s() + self._times.snapshot_s
        self._snapshots.add(self.version)

    async def _copied(self) -> None:
        await self._clock.sleep(max(0.0, self._copied_at_s - self._clock.now_s()))

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.zeros(len(ids) - 1, dtype=np.float32) for ids in token_ids]

    async def save(self, folder: str) -> None:
        raise LearnerError(f"A simulated learner has no weights to save to {folder}.")

    async def save_state(self, folder: str) -> None:
        raise LearnerError(f"A simulated learner has no weights to save to {folder}.")

    async def digest(self) -> str:
        return str(self.version)


def _result(version: PolicyVersion, num_tokens: int, compute_s: float) -> StepResult:
    return StepResult(
        version=version,
        loss=0.0,
        grad_norm=0.0,
        lr=0.0,
        num_loss_tokens=num_tokens,
        num_row_tokens=num_tokens,
        num_sample_tokens=num_tokens,
        clip_fraction=0.0,
        mismatch_kl=0.0,
        logprob_diff_max=0.0,
        compute_s=compute_s,
    )
