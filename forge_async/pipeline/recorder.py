"""Turns what the loops do into the run's records: metrics, events, rollouts, trace, progress."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_async.core.versions import PolicyVersion
from forge_async.observe import names
from forge_async.observe.group_events import EventsLog, GroupEvent
from forge_async.observe.incidents import BROADCAST_BROKEN, DELTA_REPLACED, SINK_DISABLED, STORE_RESTARTED, Incident
from forge_async.observe.progress import Progress
from forge_async.observe.rollout_log import RolloutLog, RolloutRecord
from forge_async.observe.sinks import MetricsSink
from forge_async.observe.trace import Tracer
from forge_async.pipeline.evaluations import Evaluated
from forge_async.pipeline.parity_alarm import ParityAlarm
from forge_async.pipeline.ports import (
    Admission,
    GroupRecord,
    LearnerStep,
    Pull,
    Replica,
    ReplicaStats,
    WorkerReport,
    Workers,
)
from forge_async.pipeline.publish import Publication
from forge_async.pipeline.row_figures import engine_figures, memory_figures, reference_figures, transport_line
from forge_async.pipeline.store_keeper import StoreRestart

ENDED = ("filtered", "failed", "expired", "cancelled")
NOT_ENDED = ("requeued", "stale", "late")
"""What else the replay actor counts of groups."""
COUNTED = ("trained", *ENDED, *NOT_ENDED)


@dataclass(slots=True, kw_only=True)
class _Known:
    """What is known of a group that has not ended."""

    admitted_s: float
    prompt_id: str
    replica: str
    record: GroupRecord | None = None


@dataclass(slots=True, kw_only=True)
class _Weights:
    """The newest figures of the weights' way, and what waits to be matched."""

    publish_s: float = 0.0
    pulled: PolicyVersion | None = None
    """The version that `pull_s` and `pause_s` speak of: of the slowest replica so far."""
    pull_s: float = 0.0
    pause_s: float = 0.0
    lag_s: float = 0.0
    num_bytes: int = 0
    changed_fraction: float | None = None
    probe_gap: float | None = None
    num_damaged: int = 0
    """Pulls since the last row that gave up deltas."""
    held_bytes: dict[str, int] = field(default_factory=dict)
    transports: dict[str, str] = field(default_factory=dict)
    """What brought each replica its last version."""
    step_ended_s: dict[int, float] = field(default_factory=dict)
    """Wall clock at which each version came to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    step: int
    ranks: Sequence[LearnerStep]
    ended_s: float


class Recorder:
    """Observes the ring. Its calls only note things down; `run` writes them, off the loops' path."""

    def __init__(
        self,
        *,
        begun_s: float,
        sink: MetricsSink,
        events: EventsLog,
        rollouts: RolloutLog,
        rollouts_per_step: int,
        tracer: Tracer,
        progress: Progress,
        replicas: Sequence[Replica],
        workers: Workers,
        pids: Mapping[str, int] | None = None,
        alarm: ParityAlarm | None = None,
        earlier_groups: Mapping[str, float] | None = None,
        num_done: int = 0,
    ) -> None:
        """`begun_s` is the wall clock at which the process started; all times of the records count from it.

        `pids` are processes of this machine, by name, that report nothing themselves; `alarm` looks at every row.
        `earlier_groups` are the replay actor's totals when a resumed run goes on, `num_done` the steps done before.
        """
        self._begun_s, self._sink, self._events, self._rollouts = begun_s, sink, events, rollouts
        self._rollouts_per_step, self._tracer, self._progress = rollouts_per_step, tracer, progress
        self._replicas, self._workers, self._pids = replicas, workers, dict(pids or {})
        self._alarm = alarm
        self._known: dict[int, _Known] = {}
        self._weights = _Weights()
        self._totals = {name: (earlier_groups or {}).get(f"groups/{name}", 0) for name in COUNTED}
        self._steps: deque[_Step] = deque()
        self._arrived, self._settled = asyncio.Event(), asyncio.Event()
        self._settled.set()
        self._last_ended_s = time.time()
        self._evaluation: dict[str, float] = {}
        """Figures of an evaluation that ended since the last row."""
        self._closed = False
        self._num_done_before, self._ended_s = num_done, list[float]()
        """Steps of earlier processes, and the wall clock at the end of each one since."""

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None:
        now = time.time()
        for admission in admissions:
            self._known[admission.index] = _Known(admitted_s=now, prompt_id=str(admission.prompt_id), replica=replica)

    def made(self, records: Sequence[GroupRecord]) -> None:
        for record in records:
            known = self._known.get(record.index)
            if known is None:
                continue
            known.record = record
            if record.outcome:
                self._write_events([record.index], record.outcome, record.reason, None)

    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None:
        now = time.time()
        self._weights.step_ended_s[ranks[0].result.version.step] = now
        self._steps.append(_Step(step=step, ranks=ranks, ended_s=now))
        self._ended_s.append(now)
        for number, rank in enumerate(ranks):
            for broken in rank.broken_broadcasts:
                self._incident(BROADCAST_BROKEN, f"learner_{number}: {broken}", now)
        self._settled.clear()
        self._arrived.set()

    def published(self, publication: Publication) -> None:
        self._weights.publish_s = publication.duration_s
        self._weights.num_bytes = publication.num_bytes
        self._weights.changed_fraction = publication.changed_fraction
        args = {"version": publication.version.step}
        self._tracer.add("weights", [("publish", "work", publication.started_s, publication.duration_s, args)])

    def pulled(self, replica: str, pull: Pull) -> None:
        weights, newer = self._weights, pull.version != self._weights.pulled
        weights.pull_s = max(pull.fetch_s + pull.pause_s, 0.0 if newer else weights.pull_s)
        weights.pause_s = max(pull.pause_s, 0.0 if newer else weights.pause_s)
        gaps = (pull.probe_gap, None if newer else weights.probe_gap)
        weights.probe_gap = max((gap for gap in gaps if gap is not None), default=None)
        weights.pulled = pull.version
        if weights.transports.get(replica) != pull.transport:
            weights.transports[replica] = pull.transport
            self._progress.note(f"weights to {replica}: {transport_line(pull)}")
        if pull.damage:
            weights.num_damaged += 1
            text = f"{replica} pulled {pull.version} whole: {pull.damage}"
            self._progress.note(text)
            self._incident(DELTA_REPLACED, text, pull.started_s)
        weights.held_bytes[replica] = pull.held_bytes
        args = {"version": pull.version.step}
        swap_s = pull.started_s + pull.fetch_s
        self._tracer.add(f"{replica} weights", [("fetch", "work", pull.started_s, pull.fetch_s, args)])
        self._tracer.add(f"{replica} weights", [("swap", "work", swap_s, pull.pause_s, args)])

    def store_restarted(self, restart: StoreRestart, pid: int | None) -> None:
        """The weight store died and was replaced, by a process of this pid where it is on this machine."""
        self._pids |= {} if pid is None else {"store": pid}
        self._progress.say(f"warning: {restart.sentence}")
        self._incident(STORE_RESTARTED, restart.sentence, restart.died_s, **restart.record)
        self._tracer.add("weights", [("replace the store", "wait", restart.died_s, restart.duration_s, restart.record)])

    def sink_disabled(self, text: str) -> None:
        """A further sink failed; `text` says how."""
        self._incident(SINK_DISABLED, text, time.time())

    def evaluated(self, found: Evaluated) -> None:
        """Figures of an evaluation, for the next row."""
        self._evaluation = {
            names.EVAL_SCORE: found.score,
            names.EVAL_LOW: found.scores.greedy.low,
            names.EVAL_HIGH: found.scores.greedy.high,
            names.EVAL_OLDEST_VERSION: found.scores.oldest_version,
            names.EVAL_NEWEST_VERSION: found.scores.newest_version,
            **{names.eval_pass_at(each.k): each.estimate.mean for each in found.scores.pass_at},
        }

    async def run(self) -> None:
        """Write steps as they come; ends only by cancellation."""
        while True:
            await self._write_waiting()
            self._arrived.clear()
            await self._arrived.wait()

    async def settled(self) -> None:
        """Wait until every step that was told is written. `run` ends this wait; its failure ends the run."""
        await self._settled.wait()

    async def finish(self, reason: str) -> None:
        """Write what is left, end the groups that never ended, close the files."""
        await self._write_waiting()
        self.close(reason)

    def close(self, reason: str) -> None:
        """End the groups that never ended, and close the files; needs no living actor. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._write_events(list(self._known), "cancelled", reason, None)
        for part in (self._events, self._rollouts, self._tracer, self._sink):
            part.close()

    async def _write_waiting(self) -> None:
        """Write the steps that wait; one leaves the queue when it is written, so that a cancelled write loses none."""
        while self._steps:
            await self._write_step(self._steps[0])
            self._steps.popleft()
        self._settled.set()

    async def _write_step(self, step: _Step) -> None:
        stats, reports = await asyncio.gather(
            asyncio.gather(*(replica.stats() for replica in self._replicas)), self._workers.stats()
        )
        row = self._row(step, stats, reports)
        self._sink.write(step.step + 1, row)
        self._write_rollouts(step)
        batch = step.ranks[0].batch
        self._write_events(batch["indices"], "trained", "", batch["taken_s"])
        for index, outcome, reason in batch.get("ended", ()):
            self._write_events([index], outcome, reason, None)
        self._write_trace(step, stats, reports)
        self._progress.step(row)
        if self._alarm is not None:
            self._alarm.look(row)

    def _row(self, step: _Step, stats: Sequence[ReplicaStats], reports: Sequence[WorkerReport]) -> dict[str, float]:
        first, batch = step.ranks[0], step.ranks[0].batch
        step_s = max(step.ended_s - self._last_ended_s, 1e-9)
        self._last_ended_s = step.ended_s
        result = first.result
        for replica_stats in stats:
            for swapped, first_token_s in replica_stats.service.swaps:
                if swapped in self._weights.step_ended_s:
                    self._weights.lag_s = first_token_s - self._weights.step_ended_s.pop(swapped)
        return {
            names.STEP: step.step + 1,
            names.TIME_S: step.ended_s - self._begun_s,
            names.STEP_S: step_s,
            names.LOSS: result.loss,
            names.GRAD_NORM: result.grad_norm,
            names.LEARNING_RATE: result.lr,
            names.TOKENS_TRAINED: result.num_loss_tokens,
            names.TOKENS_GENERATED: sum(replica_stats.service.tokens for replica_stats in stats),
            names.CLIP_FRACTION: result.clip_fraction,
            names.MISMATCH_KL: result.mismatch_kl,
            names.MISMATCH_LOGPROB_MAX: result.logprob_diff_max,
            **result.figures,
            names.LEARNER_BUSY: min(1.0, (result.compute_s + first.snapshot_s) / step_s),
            names.LEARNER_WAIT_DATA_S: first.wait_data_s,
            names.POLICY_BUSY: min(1.0, sum(each.service.busy_s for each in stats) / len(stats) / step_s),
            names.REWARD_BUSY: min(1.0, sum(report.score_s for report in reports) / len(reports) / step_s),
            **reference_figures(reports, step_s),
            names.TOKENS_COMPUTED: result.num_sample_tokens,
            names.USEFUL_FRACTION: result.num_sample_tokens / max(result.num_row_tokens, 1),
            **engine_figures(stats),
            names.ROLLOUTS_CUT: sum(report.num_cut for report in reports),
            names.GROUPS_SALVAGED: sum(report.num_salvaged for report in reports),
            names.SAMPLES_OVERSIZE: sum(report.num_oversize for report in reports),
            names.UNKNOWN_KEPT_SETS: sum(report.num_unknown_tokens for report in reports),
            **self._batch_figures(batch),
            **self._weight_figures(),
            **memory_figures(
                step.ranks,
                {each.name: was for each, was in zip(self._replicas, stats, strict=True)},
                reports,
                pids=self._pids,
                held_bytes=self._weights.held_bytes,
            ),
            **self._take_evaluation(),
        }

    def _incident(self, kind: str, text: str, at_s: float, **more: Any) -> None:
        """Something went wrong at this wall clock, and was mended."""
        if not self._closed:
            step = self._num_done_before + bisect_right(self._ended_s, at_s)
            incident = Incident(kind=kind, step=step, time_s=at_s - self._begun_s, text=text)
            self._events.write_incident(kind, incident.record(**more))

    def _take_evaluation(self) -> dict[str, float]:
        figures, self._evaluation = self._evaluation, {}
        return figures

    def _batch_figures(self, batch: dict) -> dict[str, float]:
        """The replay actor's figures: those of the batch as they are, running totals as what this step added."""
        figures = {name: value for name, value in batch.items() if "/" in name and not name.startswith("groups/")}
        for name in COUNTED:
            total = batch[f"groups/{name}"]
            figures[f"groups/{name}"] = total - self._totals[name]
            self._totals[name] = total
        figures[names.GROUPS_TRAINED] = len(batch["indices"])
        return figures

    def _weight_figures(self) -> dict[str, float]:
        weights = self._weights
        found = {names.WEIGHTS_CHANGED: weights.changed_fraction, names.WEIGHTS_PROBE_GAP: weights.probe_gap}
        damaged, weights.num_damaged = weights.num_damaged, 0
        return {name: value for name, value in found.items() if value is not None} | {
            names.WEIGHTS_DAMAGED: damaged,
            names.WEIGHTS_PUBLISH_S: weights.publish_s,
            names.WEIGHTS_PULL_S: weights.pull_s,
            names.WEIGHTS_PAUSE_S: weights.pause_s,
            names.WEIGHTS_LAG_S: weights.lag_s,
            names.WEIGHTS_BYTES: weights.num_bytes,
        }

    def _write_rollouts(self, step: _Step) -> None:
        records = [
            self._known[index].record for index in step.ranks[0].batch["indices"] if index in self._known
        ]  # fmt: skip
        self._rollouts.write(
            RolloutRecord(
                step=step.step + 1,
                group=record.index,
                prompt=record.prompt,
                completion=record.completion,
                reward=record.reward,
                versions=record.versions,
            )
            for record in [record for record in records if record is not None][: self._rollouts_per_step]
        )

    def _write_events(self, indices: Sequence[int], outcome: str, reason: str, taken_s: float | None) -> None:
        ended_s = time.time() - self._begun_s
        events = []
        for index in indices:
            known = self._known.pop(index, None)
            if known is None:
                continue
            record = known.record
            events.append(
                GroupEvent(
                    index=index,
                    prompt_id=known.prompt_id,
                    admitted_s=known.admitted_s - self._begun_s,
                    generated_s=self._since_begin(record.generated_s) if record else None,
                    scored_s=self._since_begin(record.scored_s) if record else None,
                    taken_s=taken_s - self._begun_s if taken_s else None,
                    ended_s=ended_s,
                    outcome=outcome,
                    reason=reason,
                    versions=record.versions if record else None,
                    replica=known.replica,
                    num_tokens=record.num_tokens if record else 0,
                    reward_mean=record.reward_mean if record else None,
                )
            )
        self._events.write(events)

    def _since_begin(self, wall_s: float | None) -> float | None:
        return None if wall_s is None else wall_s - self._begun_s

    def _write_trace(self, step: _Step, stats: Sequence[ReplicaStats], reports: Sequence[WorkerReport]) -> None:
        for number, rank in enumerate(step.ranks):
            self._tracer.add(
                f"learner_{number}", [(*span[:4], {"step": step.step} | (span[4] or {})) for span in rank.spans]
            )
        for replica, each in zip(self._replicas, stats, strict=True):
            self._tracer.add(replica.name, [(*span, None) for span in each.service.spans])
        for number, report in enumerate(reports):
            self._tracer.add(f"rollout_{number}", report.spans)
        batch = step.ranks[0].batch
        self._tracer.counter("queue", step.ended_s, depth=batch[names.QUEUE_DEPTH])
        self._tracer.counter("staleness", step.ended_s, max=batch[names.STALENESS_MAX])
