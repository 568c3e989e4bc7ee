"""One admitted group, and the states that it goes through."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forge_async.core.records import PromptId


class State(StrEnum):
    """Where an admitted group is."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    READY = "ready"
    TAKEN = "taken"
    ENDED = "ended"


UNTAKEN = (State.WAITING, State.IN_FLIGHT, State.READY)


class Effect(StrEnum):
    """What an event did."""

    CHANGED = "changed"
    REPEATED = "repeated"
    """Nothing: the ledger knew it already."""
    LATE = "late"
    """Nothing but to be counted: the group had ended, or another try of it was faster."""


@dataclass(slots=True, kw_only=True)
class Entry:
    """One group. Only the ledger writes to it."""

    index: int
    prompt_id: PromptId
    fresh: bool
    """Whether it goes through the fresh lane."""
    max_staleness: int
    """The bound that was in force when it last started, or was admitted: no step may take it older, in steps."""
    num_tokens: int
    """Tokens: an estimate until the group is ready."""
    state: State = State.WAITING
    replica: str = ""
    """Who makes it, while it is in flight; "" when that replica is gone and only the rewards are awaited."""
    floor: int = 0
    """Version that the replica served when the group last started; it moves to no older one (Law 4)."""
    num_starts: int = 0
    num_failed_tries: int = 0
    """Tries that came to nothing: given up, too old, or lost with their replica or with a crash of the run."""
    attempt: int = 0
    """Number of the latest try, counted over all groups of the run; 0 while none is awaited."""
    oldest_step: int = 0
    """Step of its oldest token, once ready."""
    ready_at_step: int = 0
    """Learner version when it became ready."""
    outcome: str = ""
    reason: str = ""
