"""Taking back the records of what a resumed run does again, so that every step and every group is told once."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import zstandard

from forge_async.observe import names
from forge_async.observe.group_events import EVENT
from forge_async.observe.jsonl import encode, read_jsonl
from forge_async.observe.rollout_log import read_rollouts
from forge_async.observe.run_directory import RunDirectory

Row = Mapping[str, Any]
ROWS_AT_ONCE = 256


def rewind(directory: RunDirectory, step: int, ended: Collection[int]) -> None:
    """Leave a run's records as they were after `step` steps. The summary and the report, which told of an end, go.

    Args:
        directory: of the run, which must not be writing.
        step: steps whose weights survive.
        ended: admission indices of the groups that had ended by then.

    The trace stays as it is, and so do the events of the run itself: they tell what happened to processes, and it did.
    """
    for path in (directory.summary, directory.report):
        path.unlink(missing_ok=True)
    _keep(directory.metrics, read_jsonl, lambda row: _at_most(row, names.STEP, step), _lines)
    _keep(directory.events, read_jsonl, lambda row: EVENT in row or row.get("index") in ended, _lines)
    _keep(directory.rollouts, read_rollouts, lambda row: _at_most(row, "step", step), _frame)


def _at_most(row: Row, name: str, limit: int) -> bool:
    value = row.get(name)
    return isinstance(value, int) and value <= limit


def _keep(
    path: Path,
    read: Callable[[Path], Iterable[Row]],
    stays: Callable[[Row], bool],
    encoded: Callable[[list[Row]], bytes],
) -> None:
    """Rewrite a file without the rows that go, at once, unless all stay. Few of its rows are in memory at a time."""
    if all(map(stays, read(path))):
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    kept = filter(stays, read(path))
    with temporary.open("wb") as file:
        while rows := list(itertools.islice(kept, ROWS_AT_ONCE)):
            file.write(encoded(rows))
    temporary.replace(path)


def _lines(rows: list[Row]) -> bytes:
    return b"".join(encode(row) + b"\n" for row in rows)


def _frame(rows: list[Row]) -> bytes:
    lines = b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8", errors="replace") + b"\n" for row in rows)
    return zstandard.ZstdCompressor(level=3).compress(lines)
