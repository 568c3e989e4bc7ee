"""events.jsonl: the way of every group, written when it ends; and, in lines of their own, what befell the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forge_async.core.errors import ForgeError
from forge_async.observe.jsonl import JsonlWriter, read_jsonl

EVENT = "event"
"""The key of a line that is about the run; lines of groups have none."""

OUTCOMES = ("trained", "filtered", "failed", "expired", "cancelled")
"""How a group may end; each admitted group ends exactly once (Law 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """One ended group. Times are seconds since the run began; None where the group never got that far."""

    index: int
    """Admission index."""
    prompt_id: str
    """source:epoch:index of the prompt."""
    admitted_s: float
    generated_s: float | None = None
    scored_s: float | None = None
    taken_s: float | None = None
    ended_s: float
    outcome: str
    """One of OUTCOMES."""
    reason: str = ""
    """Why it was filtered, failed, expired or cancelled."""
    versions: tuple[int, int] | None = None
    """Steps of the oldest and the newest version that made its tokens."""
    replica: str = ""
    """The policy replica that generated it."""
    num_tokens: int = 0
    """Tokens of all its samples, prompts included."""
    reward_mean: float | None = None
    """Mean reward of its rollouts."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ForgeError(f"Group {self.index} cannot end as {self.outcome!r}: it is none of {', '.join(OUTCOMES)}.")


_FIELDS = tuple(each.name for each in fields(GroupEvent))


class EventsLog:
    """Appends ended groups to events.jsonl."""

    def __init__(self, path: Path) -> None:
        self._writer = JsonlWriter(path)

    def write(self, events: Iterable[GroupEvent]) -> None:
        """Append groups that ended; they are in the file when this returns."""
        self._writer.write_many({name: getattr(event, name) for name in _FIELDS} for event in events)

    def write_incident(self, name: str, figures: Mapping[str, Any]) -> None:
        """Append something that happened to the run and to no group: `name` stands under EVENT."""
        self._writer.write({EVENT: name, **figures})

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """The ended groups in order of admission; where a resumed run ended one again, its last ending counts."""
    events = {int(event["index"]): event for event in read_jsonl(path) if isinstance(event.get("index"), int)}
    return [events[index] for index in sorted(events)]


def read_incidents(path: Path, name: str = "") -> list[dict[str, Any]]:
    """What happened to the run under this name ("": under any), oldest first, before it was resumed too."""
    return [event for event in read_jsonl(path) if EVENT in event and name in ("", event[EVENT])]
