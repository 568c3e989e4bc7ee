"""Runs of `apps.grpo` that are kept in a file, so that a benchmark of many of them can go on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_async.apps.bench.processes import CpuLog
from forge_async.apps.bench.results_file import Record, ResultsFile, all_code_hash, model_hash
from forge_async.apps.bench.runs import FinishedRun, run_grpo


class KeptRuns:
    """Runs once what the file does not have; a run is known by its command line, its round, the model and the code."""

    def __init__(self, path: Path, model: Path) -> None:
        """`model` is the folder that every run begins with. Raises ConfigError when `path` is no such file."""
        self._file = ResultsFile(path)
        self._depends_on = (model_hash(model), all_code_hash())
        self._at_hand: set[str] = set()
        """Keys of the runs of earlier calls that were asked for."""
        self._made: set[str] = set()
        """Keys of the runs that were made by this one."""
        self._num_shared = 0
        """How often a run was asked for that had been asked for before, under another name."""

    def run(self, words: Sequence[str], number: int, folder: Path) -> FinishedRun:
        """The run of a command line in a round, from the file or made now in `folder`. Raises as `run_grpo`."""
        key = hashlib.sha256(json.dumps([*words, number, *self._depends_on]).encode()).hexdigest()[:16]
        self._num_shared += key in self._at_hand | self._made
        if key in self._file:
            self._at_hand |= {key} - self._made
            return finished_run(self._file[key])
        run = run_grpo(words, folder)
        self._made.add(key)
        self._file.add({"key": key, "words": list(words), "round": number, **record_of(run)})
        return run

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the runs that were not made for the case that they stand under."""
        found = []
        if self._at_hand:
            found.append(
                f"{len(self._at_hand)} runs are those of earlier calls: the machine may have been another then."
            )
        if self._num_shared:
            found.append(f"{self._num_shared} runs stand under another case too, whose command line is the same.")
        return found


def record_of(run: FinishedRun) -> dict[str, Any]:
    """All that `finished_run` needs but the single groups, as JSON has it."""
    return {
        "rows": [dict(row) for row in run.rows],
        "summary": dict(run.summary),
        "times_s": [run.spawned_s, run.begun_s, run.ended_s],
        "cpu": asdict(run.cpu),
    }


def finished_run(record: Record) -> FinishedRun:
    """A run as it was kept, without its groups' events."""
    spawned_s, begun_s, ended_s = record["times_s"]
    cpu: Mapping[str, Any] = record["cpu"]
    return FinishedRun(
        rows=record["rows"],
        events=(),
        summary=record["summary"],
        spawned_s=spawned_s,
        begun_s=begun_s,
        ended_s=ended_s,
        cpu=CpuLog(times_s=list(cpu["times_s"]), readings=list(cpu["readings"])),
    )
