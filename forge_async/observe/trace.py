"""trace.json: what every actor did and waited for, for https://ui.perfetto.dev or chrome://tracing.

Actors record spans in a SpanBuffer, on the wall clock that all processes of the run share, and send them as compact
tuples; the controller's Tracer merges them. A lane (one process of the trace format) is one actor; spans of one actor
that overlap without nesting go to further rows of its lane, since the format draws a row as a stack. The file is valid
JSON after every flush: each overwrites the closing bracket with the new events and a new closing bracket in one write.

Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMCN9VUd5gn7-f0_D5M
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_async.observe.trace_file import TraceFile

logger = logging.getLogger(__name__)

WORK = "work"
"""Category of a span in which the actor did something."""
WAIT = "wait"
"""Category of a span in which it waited; the name says for what."""

Span = tuple[str, str, float, float, dict[str, Any] | None]
"""(name, category, start_s, duration_s, args): start in seconds of the wall clock (Unix epoch)."""

_RECENT_SPANS = 64
_FLUSH_EVENTS = 512


class SpanBuffer:
    """Spans of one actor until they are sent to the Tracer. Beyond `max_spans` new ones are counted, not kept."""

    def __init__(
        self,
        max_spans: int = 10_000,
        wall_s: Callable[[], float] = time.time,
        elapsed_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._spans: list[Span] = []
        self._max_spans = max_spans
        self._elapsed_s = elapsed_s
        self._origin_s = wall_s() - elapsed_s()
        self.num_dropped = 0
        """Spans that found no room since the beginning."""

    def now_s(self) -> float:
        """The run's wall clock: seconds since the Unix epoch, read once and then carried on by a steady clock."""
        return self._origin_s + self._elapsed_s()

    @contextmanager
    def span(self, name: str, category: str = WORK, /, **args: Any) -> Iterator[dict[str, Any]]:
        """Record the body as a span. Yields the span's arguments, to which the body may add what it learns."""
        start_s = self.now_s()
        try:
            yield args
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            self.record(name, category, start_s, self.now_s() - start_s, **args)

    def record(self, name: str, category: str, start_s: float, duration_s: float, /, **args: Any) -> None:
        """Add a span that has ended; `start_s` is on the clock of `now_s`."""
        if len(self._spans) < self._max_spans:
            self._spans.append((name, category, start_s, duration_s, args or None))
        else:
            self.num_dropped += 1

    def drain(self) -> list[Span]:
        """The spans recorded since the last call, in order of their ends."""
        spans, self._spans = self._spans, []
        return spans


class Tracer:
    """Merges the spans of all actors into one file. With path None it takes everything and writes nothing.

    A file that is already there (a resumed run) is continued. After `max_events` events it takes no more, with a
    warning, so that a long run does not fill the disk (about 150 bytes an event).
    """

    def __init__(self, path: Path | None, lane: str = "controller", max_events: int = 1_000_000) -> None:
        self._file = TraceFile(path) if path else None
        self._own = lane
        self._buffers: dict[str, SpanBuffer] = {}
        self._rows: dict[str, list[deque[tuple[int, int]]]] = {}
        self._pending: list[dict[str, Any]] = []
        self._room = max_events
        self.buffer(lane)

    def buffer(self, lane: str) -> SpanBuffer:
        """The buffer of an actor that lives in this process; its spans are merged at each flush."""
        return self._buffers.setdefault(lane, SpanBuffer())

    def span(self, name: str, category: str = WORK, /, **args: Any):
        """Context manager: record the body as a span of the tracer's own lane."""
        return self._buffers[self._own].span(name, category, **args)

    def now_s(self) -> float:
        """The run's wall clock, in seconds since the Unix epoch."""
        return self._buffers[self._own].now_s()

    def add(self, lane: str, spans: Iterable[Span]) -> None:
        """Merge spans that the actor `lane` recorded, in this process or another."""
        if self._file is None:
            return
        for span in sorted(spans, key=lambda span: (span[2], -span[3])):
            self._emit(self._complete_event(lane, span))

    def counter(self, name: str, at_s: float | None = None, /, **values: float) -> None:
        """Draw numbers as a curve of its own lane; `at_s` on the run's wall clock, None: now."""
        at_us = round((self.now_s() if at_s is None else at_s) * 1e6)
        self._emit({"ph": "C", "name": name, "pid": self._pid("counters"), "tid": 0, "ts": at_us, "args": values})

    def flush(self) -> None:
        """Write everything taken so far; the file is valid JSON afterwards."""
        for lane, buffer in self._buffers.items():
            self.add(lane, buffer.drain())
        self._write()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file is not None:
            self.flush()
            self._file.close()
            self._file = None

    def _complete_event(self, lane: str, span: Span) -> dict[str, Any]:
        name, category, start_s, duration_s, args = span
        start_us, end_us = round(start_s * 1e6), round((start_s + duration_s) * 1e6)
        pid, row = self._pid(lane), self._row(lane, start_us, end_us)
        event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": row, "ts": start_us}
        return {**event, "dur": end_us - start_us, "args": args or {}}

    def _row(self, lane: str, start_us: int, end_us: int) -> int:
        """The first row of the lane where the span nests with or lies apart from the latest spans."""
        rows = self._rows.setdefault(lane, [])
        for number, spans in enumerate(rows):
            if all(_stacks(start_us, end_us, *span) for span in spans):
                spans.append((start_us, end_us))
                return number
        rows.append(deque([(start_us, end_us)], maxlen=_RECENT_SPANS))
        self._emit_metadata("thread_name", self._pid(lane), len(rows) - 1, name=_row_name(lane, len(rows)))
        return len(rows) - 1

    def _pid(self, lane: str) -> int:
        """The lane's number; a new lane is named in the file."""
        if self._file is None:
            return 0
        if lane not in self._file.lanes:
            pid = self._file.lanes[lane] = max(self._file.lanes.values(), default=0) + 1
            self._emit_metadata("process_name", pid, 0, name=lane)
            self._emit_metadata("process_sort_index", pid, 0, sort_index=pid)
        return self._file.lanes[lane]

    def _emit_metadata(self, name: str, pid: int, tid: int, /, **args: Any) -> None:
        self._pending.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args})

    def _emit(self, event: dict[str, Any]) -> None:
        if self._file is None or self._room <= 0:
            return
        self._pending.append(event)
        self._room -= 1
        if self._room == 0:
            logger.warning("trace.json has reached its largest size; later spans are left out.")
        if len(self._pending) >= _FLUSH_EVENTS:
            self._write()

    def _write(self) -> None:
        if self._file is not None and self._pending:
            self._file.append(self._pending)
            self._pending = []


def _stacks(start: int, end: int, other_start: int, other_end: int) -> bool:
    """True when two spans lie apart or one holds the other."""
    apart = end <= other_start or start >= other_end
    inside = other_start <= start and end <= other_end
    return apart or inside or (start <= other_start and other_end <= end)


def _row_name(lane: str, number: int) -> str:
    return lane if number == 1 else f"{lane} ({number})"
