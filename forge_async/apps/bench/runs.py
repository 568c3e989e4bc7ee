"""One run of `apps.grpo` as a process of its own, and what it left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from forge_async.apps.bench.processes import CpuLog, ProcessTree
from forge_async.core.errors import ForgeError
from forge_async.observe.group_events import read_events
from forge_async.observe.sinks import read_metrics
from forge_async.observe.summary import read_summary

SAMPLE_EVERY_S = 1.0
"""Between two looks at the processes; each look costs some ms."""
TIMEOUT_S = 900.0
"""Longest time of one process."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A run that completed."""

    rows: Sequence[Mapping[str, Any]]
    """Of metrics.jsonl."""
    events: Sequence[Mapping[str, Any]]
    """Of events.jsonl."""
    summary: Mapping[str, Any]
    spawned_s: float
    """Wall clock when its process was started."""
    begun_s: float
    """Wall clock that the times of rows and events count from."""
    ended_s: float
    """Wall clock when its process had ended."""
    cpu: CpuLog

    @property
    def head_s(self) -> float:
        """Seconds from the start of the process to what the run calls its beginning."""
        return self.begun_s - self.spawned_s


def run_grpo(words: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> FinishedRun:
    """Run `apps.grpo` to its end.

    Args:
        words: its command line, without the run directory.
        folder: the run directory, which must not exist; `<folder>.log` takes what is printed.
        environment: variables on top of this process's own.

    Raises ForgeError when it does not complete.
    """
    command = [sys.executable, "-m", "forge_async.apps.grpo", *words, f"run.dir={folder}", "run.progress=lines"]
    log = folder.with_name(f"{folder.name}.log")
    spawned_s, cpu = time.time(), CpuLog()
    run_process(command, log, environment or {}, cpu)
    ended_s = time.time()
    summary = read_summary(folder / "summary.json")
    if summary is None or summary["status"] != "completed":
        raise ForgeError(f"The run in {folder} left no summary of a completed run; {log} says more.")
    return FinishedRun(
        rows=read_metrics(folder / "metrics.jsonl"),
        events=read_events(folder / "events.jsonl"),
        summary=summary,
        spawned_s=spawned_s,
        # The summary is written at once after its `wall_s` was read from the clock.
        begun_s=(folder / "summary.json").stat().st_mtime - float(summary["wall_s"]),
        ended_s=ended_s,
        cpu=cpu,
    )


def run_process(command: Sequence[str], log: Path, environment: Mapping[str, str], cpu: CpuLog | None = None) -> None:
    """Run a command to its end, its output to a file; raises ForgeError with the last line of it when it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        code = _wait(command, output, {**os.environ, **ENVIRONMENT, **environment}, cpu)
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise ForgeError(f"{command[1:3]} ended with exit code {code}: {lines[-1] if lines else 'no word'} ({log})")


def _wait(command: Sequence[str], output: IO[str], environment: Mapping[str, str], cpu: CpuLog | None) -> int:
    """Wait for a child and note its CPU seconds; interrupted (Ctrl-C reaches it too), give it time to tidy up."""
    deadline_s = time.monotonic() + TIMEOUT_S
    with subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT) as process:
        tree = ProcessTree(process.pid)
        try:
            while time.monotonic() < deadline_s:
                if cpu is not None:
                    cpu.add(time.time(), tree.read())
                try:
                    return process.wait(timeout=SAMPLE_EVERY_S)
                except subprocess.TimeoutExpired:
                    continue
            raise ForgeError(f"{' '.join(command[1:3])} did not end within {TIMEOUT_S:g} s; it was stopped.")
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        try:
            process.wait(timeout=20)
            return
        except subprocess.TimeoutExpired:
            end()
