"""Where metrics rows go. The first sink is the run's own record and must work; further ones may fall silent."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from forge_async.core.errors import MissingPackageError
from forge_async.observe import names
from forge_async.observe.jsonl import JsonlWriter, read_jsonl

logger = logging.getLogger(__name__)


class MetricsSink(Protocol):
    """Takes one row of metrics a learner step."""

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Record the metrics of `step`."""
        ...

    def close(self) -> None:
        """Write what is held back and let go; a second call does nothing."""
        ...


class JsonlSink:
    """metrics.jsonl: one object a step, in the file when `write` returns; numbers that are not finite are null."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._writer.write({names.STEP: step, **{name: value for name, value in row.items() if name != names.STEP}})

    def close(self) -> None:
        self._writer.close()


class TensorBoardSink:
    """TensorBoard event files under a directory. Raises MissingPackageError when tensorboard is not installed."""

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary import Writer
        except ImportError as error:
            raise MissingPackageError(
                "observe.tensorboard=true needs the package tensorboard; install it with `pip install tensorboard`."
            ) from error
        self._writer: Any | None = Writer(str(directory))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if name != names.STEP and isinstance(value, (int, float)) and math.isfinite(value):
                self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class CompositeSink:
    """Writes to a first sink, whose errors count, and to others, each disabled with one warning when it fails."""

    def __init__(
        self,
        first: MetricsSink,
        others: Sequence[MetricsSink] = (),
        told: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`told` hears in a sentence of each sink that is disabled."""
        self._first, self._told = first, told
        self._others = list(others)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._first.write(step, row)
        for sink in list(self._others):
            try:
                sink.write(step, row)
            except Exception as error:  # noqa: BLE001 - a second record must never stop the run
                self._others.remove(sink)
                text = f"{type(sink).__name__} failed at step {step} and is disabled: {error}"
                logger.warning("%s", text)
                self._told(text)

    def close(self) -> None:
        try:
            self._first.close()
        finally:
            for sink in self._others:
                _close_quietly(sink)


def _close_quietly(sink: MetricsSink) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - a second record must never stop the run
        logger.warning("%s failed while closing: %s", type(sink).__name__, error)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order of steps.

    A resumed run may take a step again; the last row of a step is the one whose weights survived, and is kept.
    """
    rows = {int(row[names.STEP]): row for row in read_jsonl(path) if isinstance(row.get(names.STEP), (int, float))}
    return [rows[step] for step in sorted(rows)]
