"""What can happen to groups, replicas and steps. The journal is a list of these; the ledger is a fold over it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_async.core.errors import ForgeError
from forge_async.core.records import PromptId

SCHEMA = 1
"""Number of this event layout; written with every event so that a reader can refuse what it does not know."""

OUTCOMES = ("trained", "filtered", "failed", "expired", "cancelled")
"""The ways in which a group can end (Law 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """A prompt became group `index` and waits for a replica."""

    index: int
    """Admission index, counted from 0 without gaps."""
    prompt_id: PromptId
    num_tokens: int
    """Estimate of the group's tokens, reserved against the token cap until the group is ready."""
    fresh: bool = False
    """Whether it goes through the fresh lane: made wholly by the version that trains on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Group `index` was given to a replica: it is in flight."""

    index: int
    replica: str
    step: int
    """Step of the version that the replica serves: no token of the group can be older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """Group `index` waits again, under the same index and prompt, to be made anew."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Group `index` is scored and its payload is in the buffer."""

    index: int
    num_tokens: int
    """Tokens of its samples, prompts included."""
    oldest_step: int
    """Step of the version that made its oldest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """A result was thrown away: another try took its place, or its weights are no longer part of the history."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Group `index` ended without being trained on."""

    index: int
    outcome: str
    """One of OUTCOMES except `trained`, which Trained says."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Step `step` consumes these groups, sorted by admission index."""

    step: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Step `step` is done: its groups ended as trained, and version `step + 1` exists at the learner."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Version `step` can be pulled."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaJoined:
    """A policy replica serves version `step` and may be given groups."""

    replica: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLeft:
    """A policy replica is gone; what it had in flight waits again, but for what it had made."""

    replica: str
    made: tuple[int, ...] = ()
    """Groups in flight with it whose tokens were all made: only their rewards are awaited, from somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Every token that the replica makes from now on is of version `step` or newer."""

    replica: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The run goes on from version `step`: whatever happened after Trained(step - 1) never happened."""

    step: int
    incarnation: int
    """Incarnation of the learner from here on; larger than before when the learner itself was restored."""
    num_attempts: int
    """Started events so far, those of lost histories included, so that attempt numbers never repeat."""
    failed_tries: tuple[tuple[int, int], ...] = ()
    """(index, tries that came to nothing) of groups that may be tried again, lost histories included."""
    fresh_lane: bool = False
    """Whether the run has a fresh lane from here on; without one, its groups join the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSet:
    """From here on groups are started under this bound; those started before keep theirs."""

    max_staleness: int
    """S, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The run stops here: every group that had not ended is cancelled."""

    reason: str


Event = (
    Admitted
    | Started
    | Requeued
    | Ready
    | Discarded
    | Ended
    | Taken
    | Trained
    | Published
    | ReplicaJoined
    | ReplicaLeft
    | Pulled
    | Restored
    | BoundSet
    | Closed
)

_KINDS: dict[str, type[Any]] = {
    "admitted": Admitted,
    "started": Started,
    "requeued": Requeued,
    "ready": Ready,
    "discarded": Discarded,
    "ended": Ended,
    "taken": Taken,
    "trained": Trained,
    "published": Published,
    "replica_joined": ReplicaJoined,
    "replica_left": ReplicaLeft,
    "pulled": Pulled,
    "restored": Restored,
    "bound_set": BoundSet,
    "closed": Closed,
}


def to_line(event: Event) -> str:
    """The event as a JSON object in one line. Written by hand, since a run writes several of them for each group."""
    head, fields = _LINES[type(event)]
    return f"{head}{''.join([key + write(getattr(event, name)) for key, name, write in fields])}}}"


_text = functools.lru_cache(maxsize=1024)(json.dumps)
"""Names and reasons come again and again."""
_WRITERS: dict[str, Callable[[Any], str]] = {
    "int": str,
    "bool": {False: "false", True: "true"}.__getitem__,
    "str": _text,
    "PromptId": lambda prompt: f"[{_text(prompt.source)},{prompt.epoch},{prompt.index}]",
}
"""By the type of a field, as it is declared."""
_LINES = {
    cls: (
        f'{{"schema":{SCHEMA},"event":"{name}"',
        [
            (f',"{field.name}":', field.name, _WRITERS.get(str(field.type), json.dumps))
            for field in dataclasses.fields(cls)
        ],
    )
    for name, cls in _KINDS.items()
}
"""How a line of each kind begins; of each field what stands before it, its name, and what writes it."""


def from_json(record: Mapping[str, Any]) -> Event:
    """Read what `to_line` wrote. Raises ForgeError for another schema, an unknown event, or missing fields."""
    if record.get("schema") != SCHEMA:
        raise ForgeError(
            f"A replay event of schema {record.get('schema')!r} cannot be read: this version of forge_async reads "
            f"schema {SCHEMA}; continue the run with the version that began it."
        )
    cls = _KINDS.get(str(record.get("event")))
    if cls is None:
        raise ForgeError(f"{record.get('event')!r} is not a replay event; known are {', '.join(_KINDS)}.")
    fields = {name: value for name, value in record.items() if name not in ("schema", "event")}
    try:
        if cls is Admitted:
            source, epoch, index = fields["prompt_id"]
            fields["prompt_id"] = PromptId(source=source, epoch=epoch, index=index)
        elif cls is Taken:
            fields["indices"] = tuple(fields["indices"])
        elif cls is ReplicaLeft:
            fields["made"] = tuple(fields.get("made", ()))
        elif cls is Restored:
            fields["failed_tries"] = tuple((index, num) for index, num in fields.get("failed_tries", ()))
        return cls(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ForgeError(f"A replay event {record['event']!r} has wrong or missing fields: {error}.") from error
