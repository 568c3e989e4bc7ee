"""Starting whole runs as a user does, and looking at what they leave behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

TINY = ["task.name=sum", "groups_per_step=8", "group_size=4", "eval.num_prompts=0"]
"""Small enough that a run's time is its start-up."""


def parity_reward(folder: Path) -> str:
    """A reward that tells completions apart whatever the model knows: what a tiny model learns from few demonstrations
    differs from one kind of processor to another. Written to `folder`; returns its reference."""
    path = folder / "parity.py"
    path.write_text("def score(completion):\n    return float(sum(map(ord, completion)) % 2)\n")
    return f"{path}:score"


@dataclass
class Finished:
    """A run that ended."""

    code: int
    output: str
    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of groups, each when it ended."""
        return [line for line in read_lines(self.folder / "events.jsonl") if "event" not in line]

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """What befell the run itself and was mended."""
        return [line for line in read_lines(self.folder / "events.jsonl") if "event" in line]

    @property
    def page(self) -> str:
        """The words of its report."""
        return " ".join(re.sub(r"<[^>]*>", " ", (self.folder / "report.html").read_text()).split())


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def environment(tmp_path: Path) -> dict[str, str]:
    """This process's, with temporary files below `tmp_path` and signals as in a terminal."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}


def start(tmp_path: Path, words: list[str], app: str = "grpo") -> subprocess.Popen[str]:
    """Begin a run; its own session, so that a test can send it a signal as a terminal would."""
    return subprocess.Popen(
        [sys.executable, "-m", f"forge_async.apps.{app}", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen[str], folder: Path, timeout_s: float = 150.0) -> Finished:
    """Wait for a run; kills it and fails when it takes longer."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end within {timeout_s} s; it said:\n{output}") from None
    summary = folder / "summary.json"
    return Finished(process.returncode, output, folder, json.loads(summary.read_text()) if summary.exists() else {})


def run(tmp_path: Path, words: list[str], timeout_s: float = 150.0) -> Finished:
    """A run from start to end in `tmp_path/run`."""
    folder = tmp_path / "run"
    return finish(start(tmp_path, [*words, f"run.dir={folder}"]), folder, timeout_s)


def until(look: Callable[[], T], within_s: float, otherwise: str) -> T:
    """What `look` finds, once that is something; fails with `otherwise` when it takes longer.

    For what the processes of a run do: they give a test no signal, so it can only look again.
    """
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
    return found


def wait_for_steps(folder: Path, count: int, process: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    """Wait until a run has done `count` steps."""

    def done() -> bool:
        enough = len(read_lines(folder / "metrics.jsonl")) >= count
        assert enough or process.poll() is None, f"the run ended early: {process.communicate()[0]}"
        return enough

    until(done, timeout_s, "the run made no steps")


def shared_memory() -> set[str]:
    """Names of what lies in shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def processes_of(folder: Path) -> dict[str, int]:
    """Pids of a run's processes that live, by log name; their own children share the log and are not meant."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                leads = os.getpgid(int(entry.name)) == int(entry.name)
                targets = {str(fd.readlink()) for fd in (entry / "fd").iterdir()} if leads else set()
            except OSError:
                continue
            for target in targets:
                if target.startswith(str(folder / "logs")):
                    found[Path(target).stem] = int(entry.name)
    return found


def descendants(pid: int) -> set[int]:
    """Pids below a process."""
    children: dict[int, set[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, set()).add(int(entry.name))
    below, new = set(), children.get(pid, set())
    while new:
        below |= new
        new = set().union(*(children.get(child, set()) for child in new)) - below
    return below


def alive(pids: set[int]) -> set[int]:
    """Those that still run (zombies do not)."""
    living = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                living.add(pid)
        except OSError:
            continue
    return living


def nothing_left(pids: set[int], within_s: float = 15.0) -> None:
    """Assert that all of `pids` are gone within 15 s."""
    until(lambda: not alive(pids), within_s, f"of {sorted(pids)} some still run")
