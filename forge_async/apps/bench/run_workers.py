"""A process that keeps an engine and does one run after the other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import TYPE_CHECKING, Any

from forge_async.config import load

if TYPE_CHECKING:
    from forge_async.apps.bench.one_process import Course, Runs

FIGURES = {
    "masked_fraction": "ratio/masked_fraction",
    "effective_fraction": "ratio/effective_fraction",
}
"""Name in a record -> name in a step's figures."""
_runs: list[Runs] = []
"""What this process keeps; at most one."""


class RunWorker:
    """The process, from outside: a context manager, begun when it is first asked for a run."""

    def __init__(self, log: Path) -> None:
        """`log` takes what the process prints."""
        self._pool = ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=_print_to, initargs=(str(log),)
        )

    def run(self, words: Sequence[str], model: Path) -> dict[str, Any]:
        """Do a run and return its record. Raises what it raises."""
        return self._pool.submit(do_run, tuple(words), model).result()

    def __enter__(self) -> RunWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._pool.submit(_close).result()
        self._pool.shutdown(wait=True, cancel_futures=True)


def do_run(words: Sequence[str], model: Path) -> dict[str, Any]:
    """Do a run in this process, on the engine that it keeps; returns its record."""
    from forge_async.apps.bench.one_process import Runs

    if not _runs:
        _runs.append(Runs())
    return record_of(_runs[0].run(load(words)[0], model))


def record_of(course: Course) -> dict[str, Any]:
    """What is kept of a run."""
    held_out = course.held_out
    record: dict[str, Any] = {
        "rewards": [round(reward, 6) for reward in course.rewards],
        "held_out_greedy": held_out.greedy.mean if held_out else None,
        "held_out_sampled": held_out.sampled.mean if held_out and held_out.sampled else None,
        "num_held_out": held_out.num_prompts if held_out else 0,
        "staleness_mean": fmean(course.ages),
        "clip_fraction": fmean(step.clip_fraction for step in course.steps),
        "wall_s": course.wall_s,
        "cpu_s": course.cpu_s,
    }
    for name, figure in FIGURES.items():
        known = [step.figures[figure] for step in course.steps if figure in step.figures]
        record |= {name: fmean(known)} if known else {}
    return record


def _close() -> None:
    while _runs:
        _runs.pop().close()


def _print_to(log: str) -> None:
    """Send what this process prints, and whatever libraries print for it, to a file."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
