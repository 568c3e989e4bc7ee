"""report.html: a run at a glance, one page that needs nothing else. Drawn from whatever the run has written so far."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from forge_async.observe import names
from forge_async.observe.group_events import OUTCOMES, read_events, read_incidents
from forge_async.observe.incidents import Incident, Told, how_often, incidents_of, tell
from forge_async.observe.progress import duration
from forge_async.observe.report_style import STYLE
from forge_async.observe.rollout_log import read_rollouts
from forge_async.observe.run_directory import RunDirectory, write_atomically
from forge_async.observe.sinks import read_metrics
from forge_async.observe.stages import number, stage_times, step_seconds
from forge_async.observe.summary import RunFacts, read_summary, summarise
from forge_async.observe.svg import Series, line_chart

Row = Mapping[str, Any]
T = TypeVar("T")

MAX_ROLLOUTS = 40
"""Rollouts shown: the first and the last half as many of the log."""
MAX_INCIDENTS = 40
"""Incidents shown one by one: the first and the last half as many."""
_MAX_TEXT = 1_200
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run has written."""

    name: str
    summary: Row
    """summary.json, or figures from the metrics with status "running" when it is not there."""
    rows: Sequence[Row]
    events: Sequence[Row]
    rollouts: Sequence[Row]
    incidents: Sequence[Incident]
    config: str


def write_report(directory: RunDirectory) -> Path:
    """Draw report.html from the files of a run, complete or not, and return its path."""
    write_atomically(directory.report, render(load(directory)))
    return directory.report


def load(directory: RunDirectory) -> RunData:
    """Read the files of a run; what is absent stays empty."""
    rows, events = read_metrics(directory.metrics), read_events(directory.events)
    config = directory.config.read_text(encoding="utf-8", errors="replace") if directory.config.exists() else ""
    return RunData(
        name=directory.path.name,
        summary=read_summary(directory.summary) or _unfinished(rows, events),
        rows=rows,
        events=events,
        rollouts=_first_and_last(read_rollouts(directory.rollouts), MAX_ROLLOUTS // 2),
        incidents=incidents_of(map(Incident.of, read_incidents(directory.events)), rows),
        config=config,
    )


def _unfinished(rows: Sequence[Row], events: Sequence[Row]) -> dict[str, Any]:
    wall_s = (number(rows[-1], names.TIME_S) if rows else None) or 0.0
    return {**summarise(RunFacts(status="interrupted", wall_s=wall_s), rows, events), "status": "running"}


def _first_and_last(things: Iterable[T], count: int) -> list[T]:
    rest = iter(things)
    return [*islice(rest, count), *deque(rest, maxlen=count)]


def render(run: RunData) -> str:
    """The page as HTML."""
    body = [
        _header(run),
        _headline(run.summary),
        *([_section("What went wrong, and was mended", _incidents(run.incidents))] if run.incidents else []),
        _section("Progress", _charts(run)),
        _section("Groups", _groups(run)),
        _section("Start-up", _startup(run.summary)),
        _section("Sampled rollouts", _rollouts(run.rollouts)),
        _section("Configuration", f"<pre>{_safe(run.config) or 'Not written.'}</pre>"),
    ]
    title = escape(f"{run.name} - forge_async")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _header(run: RunData) -> str:
    status = str(run.summary.get("status"))
    error = run.summary.get("error")
    cause = f'<p class="error">{_safe(str(error))}</p>' if error else ""
    advice = run.summary.get("bottleneck/advice")
    hint = f'<p class="advice">{_capital(_safe(str(advice)))}</p>' if advice else ""
    badge = f'<span class="status {escape(status, quote=True)}">{escape(status)}</span>'
    return f"<header><h1>{escape(run.name)} {badge}</h1>{cause}{hint}</header>"


def _headline(summary: Row) -> str:
    bound = _figure(summary, "staleness/bound", ".0f")
    share = number(summary, "overlap/fraction_of_ideal")
    cards = [
        ("steps", _figure(summary, "steps", ".0f"), ""),
        ("reward", _change(summary, "reward/first", "reward/last"), "first 5 steps to last 10"),
        ("held-out score", _change(summary, "eval/before", "eval/after"), "before to after, greedy"),
        ("staleness, most", f"{_figure(summary, 'staleness/max', '.0f')} of {bound}", "versions, of the bound"),
        ("seconds a step", _figure(summary, "overlap/step_s", ".3g"), "median"),
        ("of the ideal", "-" if share is None else f"{share:.0%}", "ideal step / step, stages as they ran"),
        ("slowest stage", str(summary.get("bottleneck") or "-"), ""),
        ("wall time", duration(number(summary, "wall_s") or 0.0), _startup_note(summary)),
    ]
    boxes = [
        f'<div class="card"><div class="what">{escape(what)}</div><div class="figure">{escape(figure)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for what, figure, note in cards
    ]
    return f'<div class="cards">{"".join(boxes)}</div>'


def _startup_note(summary: Row) -> str:
    startup_s = number(summary, "startup_s")
    return "" if startup_s is None else f"start-up {duration(startup_s)} of it"


def _charts(run: RunData) -> str:
    rows = run.rows
    steps = [float(row[names.STEP]) for row in rows]
    bound = number(run.summary, "staleness/bound")
    charts = [
        (
            "Reward",
            line_chart(steps, [*_columns(rows, mean=names.REWARD_MEAN), _held_out(rows)], y_label="reward"),
        ),
        (
            "Staleness",
            line_chart(
                steps,
                _columns(rows, most=names.STALENESS_MAX, p90=names.STALENESS_P90, mean=names.STALENESS_MEAN),
                y_label="age (versions)",
                bound=None if bound is None else ("bound", bound),
                y_top=1.0,
            ),
        ),
        (
            "Queue",
            line_chart(steps, _columns(rows, depth=names.QUEUE_DEPTH, capacity=names.QUEUE_CAPACITY), y_label="groups"),
        ),
        (
            "Busy",
            line_chart(
                steps,
                _columns(rows, learner=names.LEARNER_BUSY, policy=names.POLICY_BUSY, rewards=names.REWARD_BUSY),
                y_label="share of the step's time",
                y_top=1.0,
            ),
        ),
        ("Time of a step and of its stages", line_chart(steps, _stage_columns(rows), y_label="time (s)")),
    ]
    return '<div class="charts">' + "".join(f"<figure><h3>{t}</h3>{svg}</figure>" for t, svg in charts) + "</div>"


def _columns(rows: Sequence[Row], **labelled: str) -> list[Series]:
    return [Series(label=label, values=[number(row, name) for row in rows]) for label, name in labelled.items()]


def _held_out(rows: Sequence[Row]) -> Series:
    return Series(label="held-out", values=[number(row, names.EVAL_SCORE) for row in rows], sparse=True)


def _stage_columns(rows: Sequence[Row]) -> list[Series]:
    whole = step_seconds(rows)
    stages = [step_s and stage_times(row, step_s) for row, step_s in zip(rows, whole, strict=True)]
    parts = [
        Series(label=stage, values=[getattr(times, stage) if times else None for times in stages])
        for stage in ("generation", "training", "scoring", "weights")
    ]
    return [Series(label="step", values=whole), *(part for part in parts if any(part.values))]


def _incidents(incidents: Sequence[Incident]) -> str:
    kinds = [(_capital(each.what), how_often(each.times), _when(each), each.lost) for each in tell(incidents)]
    single = _first_and_last((each for each in incidents if each.text), MAX_INCIDENTS // 2)
    rows = [
        ("-" if each.step is None else str(each.step), "-" if each.time_s is None else duration(each.time_s), each.text)
        for each in single
    ]
    return _table(("what went wrong, and how it was mended", "how often", "when", "what was lost"), kinds) + (
        _table(("after step", "time", "what happened"), rows) if rows else ""
    )


def _when(told: Told) -> str:
    if told.first_s is None or told.last_s is None:
        return told.steps or "-"
    times = dict.fromkeys((duration(told.first_s), duration(told.last_s)))
    return f"{told.steps} ({' to '.join(times)})".strip()


def _groups(run: RunData) -> str:
    columns = ("admitted", *OUTCOMES)
    totals = _table(columns, [[_figure(run.summary, f"groups/{column}", ".0f") for column in columns]])
    reasons = Counter(
        (str(event.get("outcome")), str(event["reason"])) for event in run.events if event.get("reason")
    ).most_common(12)
    why = [(outcome, reason, str(count)) for (outcome, reason), count in reasons]
    return totals + (_table(("outcome", "reason", "groups"), why) if why else "")


def _startup(summary: Row) -> str:
    phases = [(key[8:-2], value) for key, value in summary.items() if key.startswith("startup/") and key.endswith("_s")]
    if not phases:
        return '<p class="none">Nothing was recorded.</p>'
    return _table(("phase", "seconds"), [(name, f"{value:.1f}") for name, value in phases if value is not None])


def _rollouts(rollouts: Sequence[Row]) -> str:
    if not rollouts:
        return '<p class="none">Nothing was recorded.</p>'
    columns = ("step", "group", "reward", "versions", "prompt", "completion")
    return _table(columns, [_rollout_cells(row) for row in rollouts], texts=("prompt", "completion"))


def _rollout_cells(row: Row) -> tuple[str, ...]:
    versions = row.get("versions")
    made_by = " to ".join(map(str, dict.fromkeys(versions))) if isinstance(versions, list) else "-"
    texts = [_shorten(str(row.get(column, ""))) for column in ("prompt", "completion")]
    return str(row.get("step", "-")), str(row.get("group", "-")), _figure(row, "reward", ".3g"), made_by, *texts


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text) - _MAX_TEXT} more characters)"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[str] = ()) -> str:
    """A table of escaped cells; columns named in `texts` keep their line breaks."""
    kinds = [' class="text"' if column in texts else "" for column in columns]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for kind, column in zip(kinds, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{_safe(cell)}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _safe(text: str) -> str:
    """Text as HTML; control characters, which a model may well emit, become visible."""
    return escape(_CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text))


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>"


def _change(summary: Row, first: str, last: str) -> str:
    return f"{_figure(summary, first, '.2f')} → {_figure(summary, last, '.2f')}"


def _figure(row: Row, name: str, form: str) -> str:
    value = number(row, name)
    return "-" if value is None else format(value, form)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
