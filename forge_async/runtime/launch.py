"""From a checked configuration to a finished run: processes, actors, records, and the end of them all."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from forge_async.config.schema import Config
from forge_async.core.errors import ForgeError
from forge_async.core.garbage import settle_heap
from forge_async.core.loop_watch import LoopWatch
from forge_async.observe.group_events import EventsLog
from forge_async.observe.progress import Progress
from forge_async.observe.rollout_log import RolloutLog
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import CompositeSink, JsonlSink, MetricsSink, TensorBoardSink
from forge_async.observe.trace import Tracer
from forge_async.pipeline.collecting import CUT_TIMEOUT_S
from forge_async.pipeline.parity_alarm import ParityAlarm, default_limit
from forge_async.pipeline.recorder import Recorder
from forge_async.pipeline.ring import RingSettings
from forge_async.pipeline.run import Run, RunResult
from forge_async.pipeline.store_keeper import StoreKeeper
from forge_async.pipeline.watchdog import Watchdog
from forge_async.replay.auto_staleness import AutoStaleness
from forge_async.replay.lanes import Lanes
from forge_async.runtime.meshes import Placement, close_monarch
from forge_async.runtime.resume import ResumePoint
from forge_async.runtime.wiring import Actors, start_actors

NET_S = 10.0
"""What the watchdog grants on top of the deadlines of single calls."""


class Launch:
    """One run, and what is known of it at any moment."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        directory: RunDirectory,
        progress: Progress,
        begun_s: float,
        resume: ResumePoint | None = None,
    ) -> None:
        """`begun_s` is the wall clock at which the process started; `resume` is where the run goes on, if it does."""
        self._config, self._model_folder, self._directory = config, model_folder, directory
        self._progress, self._begun_s, self._resume = progress, begun_s, resume
        self.startup: dict[str, float] = {}
        """Seconds from the process's start until each part was ready."""
        self.startup_s: float | None = None
        """Seconds until the first group was admitted."""
        self.result = RunResult()
        self._recorder: Recorder | None = None

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest one: where a run goes on that has ended now; None when there is none yet."""
        return self.result.checkpoint or (self._resume.checkpoint if self._resume else None)

    async def run(self) -> None:
        """Start, train, stop. Whatever happens, no process is left and the records are closed."""
        loop_watch = LoopWatch("the controller", self._warn).start()
        placement = await Placement.start(self._config.job, self._directory.path)
        try:
            actors = await start_actors(
                self._config, self._model_folder, placement, self._directory.path, self._ready, self._resume
            )
            await self._train(actors)
        finally:
            if self._recorder is not None:
                self._recorder.close("the run ended early")
            await asyncio.shield(placement.stop(self._config.run.stop_timeout_s))
            await close_monarch()
            loop_watch.close()

    async def _train(self, actors: Actors) -> None:
        """Run beside a watch over every process: the first death ends the run by name, unless it is mended."""
        run = self._build_run(actors, await actors.replay.state() if self._resume else {})
        self.result = run.result
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(run.keep_store(), name="store")
            watches = [group.create_task(_raise_on_death(handle.watch.wait_for_death)) for handle in actors.handles]
            version = await run.prepare()
            self.startup_s = time.time() - self._begun_s
            self._progress.phase("start-up", self.startup_s)
            settle_heap()
            await run.train(version)
            for watch in (keeper, *watches):
                watch.cancel()

    def _build_run(self, actors: Actors, earlier_groups: Mapping[str, float]) -> Run:
        run_begun_s = self._begun_s - (self._resume.earlier_s if self._resume else 0.0)
        config, directory, dials = self._config, self._directory, self._config.asynchrony
        others: list[MetricsSink] = [TensorBoardSink(directory.tensorboard)] if config.observe.tensorboard else []
        self._recorder = Recorder(
            begun_s=run_begun_s,
            sink=CompositeSink(JsonlSink(directory.metrics), others, self._sink_disabled),
            events=EventsLog(directory.events),
            rollouts=RolloutLog(directory.rollouts),
            rollouts_per_step=config.run.rollouts_per_step,
            tracer=Tracer(directory.trace if config.observe.trace else None),
            progress=self._progress,
            replicas=actors.replicas,
            workers=actors.workers,
            pids={"controller": os.getpid(), **actors.silent_pids},
            alarm=ParityAlarm(_alarm_limit(config), self._warn),
            earlier_groups=earlier_groups,
            num_done=self._resume.version.step if self._resume else 0,
        )
        return Run(
            replay=actors.replay,
            learner=actors.learner,
            replicas=actors.replicas,
            workers=actors.workers,
            recorder=self._recorder,
            ring=RingSettings(
                num_steps=config.root.steps,
                groups_per_step=config.root.groups_per_step,
                publish_every=dials.publish_every,
                # A single call has its own, shorter deadline and says more; these are the net below.
                step_limit_s=2 * config.run.step_timeout_s + NET_S,
                make_limit_s=config.rollout.group_timeout_s + CUT_TIMEOUT_S + NET_S,
                weights_limit_s=4 * config.weights.timeout_s + NET_S + _mending_s(config),
            ),
            evaluation=config.eval,
            checkpoint=config.checkpoint,
            keep_versions=config.weights.keep_versions,
            store=self._keeper(actors),
            checkpoints_folder=directory.checkpoints,
            watchdog=Watchdog(warn_after_s=config.run.warn_after_s, warn=self._warn, explain=actors.replay.why),
            evaluate_beside=not Lanes.of(dials, config.root.groups_per_step).synchronous,
            max_fruitless_steps=dials.max_filtered_batches,
            auto=AutoStaleness.of(dials, config.root.groups_per_step),
            say=self._progress.say,
            begun_s=run_begun_s,
            resumed=self._resume.state if self._resume else None,
        )

    def _keeper(self, actors: Actors) -> StoreKeeper:
        recorder, weights = self._recorder, self._config.weights
        assert recorder is not None, "the records come first"
        return StoreKeeper(
            actors.store,
            weights.restarts,
            lambda restart: recorder.store_restarted(restart, actors.store.pid),
            remark=weights.why_no_restart,
        )

    def _warn(self, text: str) -> None:
        self._progress.say(f"warning: {text}")

    def _sink_disabled(self, text: str) -> None:
        if self._recorder is not None:
            self._recorder.sink_disabled(text)

    def _ready(self, name: str, _: float) -> None:
        self.startup[name] = time.time() - self._begun_s
        self._progress.phase(f"{name} ready", self.startup[name])


def _alarm_limit(config: Config) -> float:
    given = config.run.parity_alarm
    if not isinstance(given, str):
        return given
    is_quantized = config.policy.quantize != "none"
    return default_limit(config.policy.dtype, config.learner.dtype, is_quantized=is_quantized)


async def _raise_on_death(wait_for_death: Callable) -> None:
    error: ForgeError = await wait_for_death()
    raise error


def _mending_s(config: Config) -> float:
    """What replacing the store may add to the wait for a publication or a pull."""
    return config.weights.restarts * (config.run.start_timeout_s + 2 * config.weights.timeout_s)
