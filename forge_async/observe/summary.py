"""summary.json: a run in figures, written at its end, also after a failure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from forge_async.core.errors import ForgeError
from forge_async.observe import names
from forge_async.observe.group_events import OUTCOMES, read_events, read_incidents
from forge_async.observe.incidents import STORE_RESTARTED, Incident, incidents_of, tell
from forge_async.observe.jsonl import plain
from forge_async.observe.run_directory import RunDirectory, write_atomically
from forge_async.observe.sinks import read_metrics
from forge_async.observe.stages import advice, median_stage_times, median_step_s, number

STATUSES = ("completed", "failed", "interrupted")
FIRST_STEPS, LAST_STEPS = 5, 10
"""Steps that `reward/first` and `reward/last` are means of."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What metrics and events do not say about a run."""

    status: str
    """One of STATUSES."""
    error: str | None = None
    """The cause in one sentence, when it failed."""
    wall_s: float
    """Seconds from the process's start to the end of the run."""
    startup_s: float | None = None
    """Seconds of these until the first group was admitted."""
    startup: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start-up, by name; phases may overlap."""
    max_staleness: int | None = None
    """S, the bound; None: no bound."""
    eval_before: float | None = None
    """Score on held-out prompts before the first step."""
    eval_after: float | None = None
    """The same after the last step."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Each evaluation: `step`, `score`, `low`, `high`, `oldest_version`, `newest_version`, `pass_at_<k>` and more."""
    best_checkpoint: str | None = None
    """Folder of the checkpoint where the best evaluation began; None when none was kept."""
    last_checkpoint: str | None = None
    """Folder of the newest checkpoint; None when none was written."""
    resumed_at: Sequence[int] = ()
    """Steps after which the run was continued, in order."""
    groups: Mapping[str, int] | None = None
    """The ledger's totals (`admitted` and the outcomes), where it could be asked; None: counted from the events."""
    weights_sha256: str | None = None
    """Fingerprint of the final weights."""
    incidents: Sequence[Incident] = ()
    """What went wrong and was mended, as far as the metrics do not say it."""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ForgeError(f"A run cannot end as {self.status!r}: it is none of {', '.join(STATUSES)}.")


def summarise(facts: RunFacts, rows: Sequence[Row], events: Sequence[Row]) -> dict[str, Any]:
    """The summary of a run, with null for what is not known.

    Args:
        facts: what the run itself knows.
        rows: metrics rows in order of steps.
        events: ended groups.
    """
    return {
        "status": facts.status,
        "error": facts.error,
        "steps": int(rows[-1][names.STEP]) if rows else 0,
        "wall_s": facts.wall_s,
        "startup_s": facts.startup_s,
        **{f"startup/{name}_s": duration_s for name, duration_s in facts.startup.items()},
        "eval/before": facts.eval_before,
        "eval/after": facts.eval_after,
        "checkpoint/best": facts.best_checkpoint,
        "checkpoint/last": facts.last_checkpoint,
        "resumed_at": list(facts.resumed_at),
        "eval/all": [dict(found) for found in facts.evaluations],
        "reward/first": _mean(_values(rows[:FIRST_STEPS], names.REWARD_MEAN)),
        "reward/last": _mean(_values(rows[-LAST_STEPS:], names.REWARD_MEAN)),
        "staleness/max": max(map(int, _values(rows, names.STALENESS_MAX)), default=None),
        "staleness/bound": facts.max_staleness,
        **_overlap(facts, rows),
        **{f"groups/{name}": count for name, count in _group_totals(facts, rows, events).items()},
        "tokens/trained": int(sum(_values(rows, names.TOKENS_TRAINED))),
        "tokens/generated": int(sum(_values(rows, names.TOKENS_GENERATED))),
        "weights/store_restarts": sum(each.times for each in facts.incidents if each.kind == STORE_RESTARTED),
        "incidents": [told.record() for told in tell(incidents_of(facts.incidents, rows))],
        "weights_sha256": facts.weights_sha256,
    }


def _overlap(facts: RunFacts, rows: Sequence[Row]) -> dict[str, Any]:
    times, step_s = median_stage_times(rows), median_step_s(rows)
    ideal_s = times.ideal_step_s(facts.max_staleness)
    known = step_s is not None and ideal_s > 0
    return {
        "overlap/ideal_step_s": ideal_s if known else None,
        "overlap/step_s": step_s,
        "overlap/fraction_of_ideal": ideal_s / step_s if known and step_s else None,
        "bottleneck": times.slowest(),
        "bottleneck/advice": advice(times, facts.max_staleness),
    }


def _group_totals(facts: RunFacts, rows: Sequence[Row], events: Sequence[Row]) -> dict[str, int]:
    if facts.groups is not None:
        return {"admitted": 0, **dict.fromkeys(OUTCOMES, 0), **facts.groups}
    if events:
        ended = Counter(event.get("outcome") for event in events)
        return {"admitted": len(events), **{outcome: ended[outcome] for outcome in OUTCOMES}}
    counts = {outcome: int(sum(_values(rows, f"groups/{outcome}"))) for outcome in OUTCOMES}
    return {"admitted": sum(counts.values()), **counts}


def _values(rows: Sequence[Row], name: str) -> list[float]:
    return [value for row in rows if (value := number(row, name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def write_summary(directory: RunDirectory, facts: RunFacts) -> dict[str, Any]:
    """Read what the run has written, write summary.json as a whole, and return it."""
    facts = replace(facts, incidents=[Incident.of(line) for line in read_incidents(directory.events)])
    summary = summarise(facts, read_metrics(directory.metrics), read_events(directory.events))
    write_atomically(directory.summary, json.dumps(plain(summary), indent=2, ensure_ascii=False) + "\n")
    return summary


def read_summary(path: Path) -> dict[str, Any] | None:
    """The summary of a run; None when the run has not ended or could not write it."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) else None
