"""What went wrong in a run and was mended there: one list, whatever it was.

Whoever mends a failure writes an Incident into events.jsonl (`EventsLog.write_incident`), and it stands in the report,
the summary and the last lines of the run. What is mended in great numbers (rollouts that are cut off, groups whose
places others take) is counted in metrics.jsonl, and comes from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forge_async.observe import names
from forge_async.observe.group_events import EVENT
from forge_async.observe.stages import number

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of failure that is mended."""

    title: str
    """What went wrong and how it was mended, in plain words."""
    lost: str = "nothing"
    """What is gone where the figures of an incident say nothing of it."""


STORE_RESTARTED = "store_restarted"
DELTA_REPLACED = "delta_replaced"
BROADCAST_BROKEN = "broadcast_broken"
SINK_DISABLED = "sink_disabled"
RESUMED = "resumed"
ROLLOUTS_CUT = "rollouts_cut"
GROUPS_FAILED = "groups_failed"
GROUPS_EXPIRED = "groups_expired"
GROUPS_REQUEUED = "groups_requeued"
GROUPS_STALE = "groups_stale"

KINDS: dict[str, Kind] = {
    RESUMED: Kind(title="the run ended before its last step and was resumed"),
    STORE_RESTARTED: Kind(title="the weight store died and another took its place"),
    DELTA_REPLACED: Kind(title="a delta of the weights was damaged and the version was pulled whole"),
    BROADCAST_BROKEN: Kind(title="a broadcast of the weights broke off and who missed it pulled the version"),
    SINK_DISABLED: Kind(
        title="a further record of the metrics failed and was switched off",
        lost="what it would have recorded since; metrics.jsonl has it",
    ),
    ROLLOUTS_CUT: Kind(title="rollouts took longer than rollout.timeout_s and were cut off"),
    GROUPS_FAILED: Kind(title="groups could not be made and other prompts took their places"),
    GROUPS_REQUEUED: Kind(title="groups grew older than the bound on age allows, or were given up, and are made again"),
    GROUPS_STALE: Kind(title="groups grew older than the bound on age allows and were trained on all the same"),
    GROUPS_EXPIRED: Kind(title="groups grew older than the bound on age allows and other prompts took their places"),
}
"""All kinds, in the order in which they are told; a name that is not here is told by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A failure that was mended, or several of one kind within a step."""

    kind: str
    """A key of KINDS."""
    step: int | None = None
    """Learner steps that were done; None: not known."""
    time_s: float | None = None
    """Seconds since the run began; None: not known."""
    text: str = ""
    """What happened this time, in a sentence; "" where there is no more to say than its kind does."""
    times: int = 1
    """How often."""
    steps_again: int = 0
    """Steps that were done once more."""
    groups_again: int = 0
    """Groups that were begun and are made once more."""
    groups_lost: int = 0
    """Groups that nobody is trained on, whose places others took."""
    rollouts_lost: int = 0
    """Rollouts that nobody is trained on."""

    def record(self, **more: Any) -> dict[str, Any]:
        """For `EventsLog.write_incident`, less what says nothing. `more` is for readers who know the kind."""
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "kind"}
        return {name: value for name, value in own.items() if value != _UNSAID[name]} | more

    @classmethod
    def of(cls, line: Row) -> Incident:
        """Read what `record` wrote; a figure that is no number counts as not told."""
        figures = {name: line[name] for name in _FIGURES if isinstance(line.get(name), (int, float))}
        return cls(kind=str(line[EVENT]), text=str(line.get("text") or ""), **figures)


_UNSAID = {each.name: each.default for each in fields(Incident)}
_FIGURES = tuple(name for name in _UNSAID if name not in ("kind", "text"))


def incidents_of(told: Iterable[Incident], rows: Iterable[Row]) -> list[Incident]:
    """All incidents of a run, those of a kind in the order in which they happened.

    Args:
        told: those in events.jsonl.
        rows: of metrics.jsonl.
    """
    return [*told] + [incident for row in rows for incident in _counted(row)]


def _counted(row: Row) -> list[Incident]:
    found: list[Incident] = []
    for kind, name, lost in (
        (ROLLOUTS_CUT, names.ROLLOUTS_CUT, "rollouts_lost"),
        (GROUPS_FAILED, names.GROUPS_FAILED, "groups_lost"),
        (GROUPS_EXPIRED, names.GROUPS_EXPIRED, "groups_lost"),
        (GROUPS_REQUEUED, names.GROUPS_REQUEUED, "groups_again"),
        (GROUPS_STALE, names.GROUPS_STALE, ""),
    ):
        if count := int(number(row, name) or 0):
            figures: dict[str, Any] = {"times": count} | ({lost: count} if lost else {})
            found.append(Incident(kind=kind, step=int(row[names.STEP]), time_s=number(row, names.TIME_S), **figures))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """All incidents of a kind, in plain words."""

    kind: str
    what: str
    """What went wrong and how it was mended."""
    times: int
    first_step: int | None
    """Steps that were done when it happened first; None: not known."""
    last_step: int | None
    first_s: float | None
    """Seconds since the run began."""
    last_s: float | None
    lost: str
    """What is gone, or was done again."""

    def record(self) -> dict[str, Any]:
        """For summary.json."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, record: Row) -> Told:
        """Read what `record` wrote."""
        return cls(**{each.name: record[each.name] for each in fields(cls)})

    @property
    def line(self) -> str:
        """For the end of a run's output."""
        when = f", {self.steps}" if self.steps else ""
        return f"mended: {self.what} ({how_often(self.times)}{when}); lost: {self.lost}"

    @property
    def steps(self) -> str:
        """`after step 3`, `between steps 3 and 41`; "" where it is not known."""
        if self.first_step is None:
            return ""
        if self.first_step == self.last_step:
            return f"after step {self.first_step}"
        return f"between steps {self.first_step} and {self.last_step}"


def tell(incidents: Sequence[Incident]) -> list[Told]:
    """One line a kind, in the order of KINDS; kinds that are not there come last."""
    order = [*KINDS, *sorted({each.kind for each in incidents} - KINDS.keys())]
    return [_told(kind, same) for kind in order if (same := [each for each in incidents if each.kind == kind])]


def _told(kind: str, incidents: Sequence[Incident]) -> Told:
    steps = [each.step for each in incidents if each.step is not None]
    times_s = [each.time_s for each in incidents if each.time_s is not None]
    words = KINDS.get(kind, Kind(title=kind.replace("_", " ")))
    return Told(
        kind=kind,
        what=words.title,
        times=sum(each.times for each in incidents),
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        first_s=min(times_s, default=None),
        last_s=max(times_s, default=None),
        lost=_lost(incidents) or words.lost,
    )


def _lost(incidents: Sequence[Incident]) -> str:
    parts = [
        (sum(each.steps_again for each in incidents), "step", "done again"),
        (sum(each.groups_again for each in incidents), "group", "made again"),
        (sum(each.groups_lost for each in incidents), "group", ""),
        (sum(each.rollouts_lost for each in incidents), "rollout", ""),
    ]
    return ", ".join(f"{counted(count, what)} {fate}".rstrip() for count, what, fate in parts if count)


def counted(count: int, what: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def how_often(times: int) -> str:
    """`once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(times, f"{times} times")
