"""What a person at the terminal sees: one live line, or a line now and then where nobody can watch a live one."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TextIO

from forge_async.observe import names
from forge_async.observe.incidents import Told
from forge_async.observe.stages import number, stage_times

_RECENT_STEPS = 10
_CLEAR_TO_END = "\x1b[K"
_LABEL_WIDTH = 22


class Progress:
    """Shows start-up phases, steps and the end of a run.

    Args:
        total_steps: steps of the whole run.
        stream: where to write, standard output or error.
        mode: `live` rewrites one line; `lines` writes one at least `every_s` seconds apart; `auto` is live on a
            terminal and lines elsewhere; `off` shows only the end.
        every_s: least seconds between two lines of `lines`.
        now_s: a steady clock.
        max_staleness: the bound, shown beside the staleness; None: not shown.
    """

    def __init__(
        self,
        total_steps: int,
        stream: TextIO,
        mode: str = "auto",
        every_s: float = 5.0,
        now_s: Callable[[], float] = time.monotonic,
        max_staleness: int | None = None,
    ) -> None:
        self._total = total_steps
        self._stream = stream
        self._mode = ("live" if stream.isatty() else "lines") if mode == "auto" else mode
        self._every_s = every_s
        self._bound = "" if max_staleness is None else f"/{max_staleness}"
        self._now_s = now_s
        self._shown_at_s: float | None = None
        self._last_step_at_s: float | None = None
        self._step_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._live = False

    def phase(self, name: str, duration_s: float) -> None:
        """A phase of the start-up is done: `policy ready    18.2 s`."""
        self.note(f"{name:<{_LABEL_WIDTH}}{duration_s:>8.1f} s")

    def waiting(self, text: str) -> None:
        """Say what the run waits for; shown on a terminal only, until something else happens."""
        if self._mode == "live":
            self._show_live(f"waiting for {text}")

    def step(self, row: Mapping[str, Any]) -> None:
        """A learner step is done; `row` is its metrics row."""
        if self._mode == "off":
            return
        now_s, step = self._now_s(), int(row[names.STEP])
        parts = self._parts(step, row, self._measure(row, now_s))
        if self._mode == "live":
            self._show_live(_fit(parts, self._columns()))
        elif self._shown_at_s is None or now_s - self._shown_at_s >= self._every_s or step >= self._total:
            self._shown_at_s = now_s
            self.say("  ".join(parts))

    def _measure(self, row: Mapping[str, Any], now_s: float) -> float | None:
        """Seconds of this step: its own figure, else since the step before; None when neither is known."""
        before_s, self._last_step_at_s = self._last_step_at_s, now_s
        step_s = number(row, names.STEP_S)
        if step_s is None and before_s is not None:
            step_s = now_s - before_s
        if step_s is not None:
            self._step_s.append(step_s)
        return step_s

    def _parts(self, step: int, row: Mapping[str, Any], step_s: float | None) -> list[str]:
        usual_s = median(self._step_s) if self._step_s else None
        slowest = (None if step_s is None else stage_times(row, step_s).slowest()) or "-"
        depth, capacity = _figure(row, names.QUEUE_DEPTH, ".0f"), _figure(row, names.QUEUE_CAPACITY, ".0f")
        return [
            f"step {step:>{len(str(self._total))}}/{self._total}",
            f"reward {_figure(row, names.REWARD_MEAN, '.3f')}",
            f"staleness {_figure(row, names.STALENESS_MAX, '.0f')}{self._bound}",
            f"queue {depth:>{len(capacity)}}/{capacity}",
            f"slowest {slowest:<10}",
            "- s/step" if usual_s is None else f"{usual_s:.2f} s/step",
            "- left" if usual_s is None else f"{duration(usual_s * max(0, self._total - step))} left",
        ]

    def note(self, text: str) -> None:
        """Write a line of its own, unless only the end is to be seen."""
        if self._mode != "off":
            self.say(text)

    def say(self, text: str) -> None:
        """Write a line of its own, above the live line."""
        self._stream.write(f"\r{_CLEAR_TO_END}{text}\n" if self._live else f"{text}\n")
        self._live = False
        self._stream.flush()

    def finish(self, summary: Mapping[str, Any], report: Path) -> None:
        """The last lines: what the run reached, where the report is, and the cause when it failed."""
        if self._live:
            self._stream.write("\n")
            self._live = False
        for line in closing_lines(summary, report):
            self.say(line)

    def _columns(self) -> int:
        return shutil.get_terminal_size().columns - 1

    def _show_live(self, text: str) -> None:
        self._stream.write(f"\r{text[: self._columns()]}{_CLEAR_TO_END}")
        self._live = True
        self._stream.flush()


def _fit(parts: list[str], columns: int) -> str:
    """The parts on one line of a terminal; on a narrow one the queue goes first, then the slowest stage."""
    for left_out in ((), ("queue",), ("queue", "slowest")):
        line = "  ".join(part for part in parts if not part.startswith(left_out))
        if len(line) <= columns:
            break
    return line


def closing_lines(summary: Mapping[str, Any], report: Path) -> list[str]:
    """The last lines of a run; that of a failed one ends with the cause."""
    startup = number(summary, "startup_s")
    took = duration(number(summary, "wall_s") or 0.0) + (f" (start-up {duration(startup)})" if startup else "")
    steps = summary.get("steps", 0)
    lines = [f"{steps} step{'' if steps == 1 else 's'} in {took}"]
    if number(summary, "reward/last") is not None:
        lines.append(f"reward {_figure(summary, 'reward/first', '.3f')} -> {_figure(summary, 'reward/last', '.3f')}")
    if number(summary, "eval/after") is not None:
        before, after = (_figure(summary, f"eval/{when}", ".3f") for when in ("before", "after"))
        lines.append(f"held-out {before} -> {after}")
    lines = [", ".join(lines), *(Told.of(record).line for record in summary.get("incidents", ()))]
    if summary.get("bottleneck/advice"):
        lines.append(str(summary["bottleneck/advice"]))
    lines.append(f"report: {report}")
    status = summary.get("status")
    if status != "completed":
        if summary.get("checkpoint/last"):
            lines.append(f"to go on: python -m forge_async.apps.grpo run.dir={report.parent} run.resume=true")
        lines.append(f"{status}: {summary['error']}" if summary.get("error") else f"{status}")
    return lines


def duration(seconds: float) -> str:
    """`42 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _figure(row: Mapping[str, Any], name: str, form: str) -> str:
    value = number(row, name)
    return "-" if value is None else format(value, form)
