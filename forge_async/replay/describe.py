"""What the room tells people: figures for the metrics, and what somebody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_async.replay import events as ev
from forge_async.replay.bound import UNLIMITED
from forge_async.replay.entry import Entry, State

if TYPE_CHECKING:
    from forge_async.replay.state import ReplayState


def figures(state: ReplayState) -> dict[str, float]:
    """Figures under the names of `metrics.jsonl`; ages are those of the batch taken last."""
    ledger, ended = state.ledger, state.ledger.outcomes
    return {
        "queue/depth": len(ledger.ready),
        "queue/waiting": ledger.counts[State.WAITING],
        "queue/in_flight": ledger.counts[State.IN_FLIGHT],
        "queue/capacity": capacity(state),
        "queue/tokens": ledger.queue_tokens,
        "queue/bytes": state.buffer.num_bytes,
        "groups/admitted": ledger.num_admitted,
        **{f"groups/{outcome}": ended[outcome] for outcome in ev.OUTCOMES},
        "groups/late": ledger.num_late,
        "groups/requeued": ledger.num_requeued,
        "groups/stale": state.num_stale,
        **state.last_ages.metrics(),
    }


def capacity(state: ReplayState) -> int:
    """Depth in groups; for `stream` what the token cap holds at the present mean."""
    if state.bound.depth < UNLIMITED:
        return state.bound.depth
    by_tokens = int(state.settings.max_queue_tokens / max(state.ledger.mean_tokens, 1.0))
    return max(state.bound.groups_per_step, by_tokens)


def why_no_batch(state: ReplayState) -> str:
    """What the next step waits for, in one sentence without full stop."""
    ledger = state.ledger
    text = (
        f"step {ledger.next_step} needs {state.bound.groups_per_step} groups: {len(ledger.ready)} are ready, "
        f"{ledger.counts[State.IN_FLIGHT]} in flight, {ledger.counts[State.WAITING]} waiting for a replica"
    )
    blocked = next((ledger.entries[index] for index in ledger.untaken if index not in ledger.ready), None)
    if blocked is None:
        return text
    return f"{text}; the oldest that is missing is group {blocked.index} ({_whereabouts(blocked)})"


def why_no_admission(state: ReplayState, replica: str) -> str:
    """What a replica that is given nothing waits for, in one sentence without full stop."""
    ledger, version = state.ledger, state.admitter.version_of(replica)
    num_untaken, behind = len(ledger.untaken), ledger.steps_unpulled(version)
    if ledger.closed:
        return "the run is closed"
    if state.num_wanted() <= 0 and not ledger.counts[State.WAITING]:
        return "the steps to come need no further group"
    if state.bound.synchronous and (ledger.counts[State.WAITING] or ledger.counts[State.IN_FLIGHT]):
        return f"at max_staleness=0 the round in progress must end first; {why_no_batch(state)}"
    if ledger.in_flight[replica] >= state.admitter.fair_share(replica) > 0:
        return f"{replica} has {ledger.in_flight[replica]} groups in flight, as many as its measured speed is worth"
    if state.bound.room(num_untaken, behind) <= 0:
        return (
            f"{num_untaken} groups are untaken and {replica} at version {version} has not pulled the result of "
            f"{behind} steps; depth {state.bound.depth} is used up until the learner takes or {replica} pulls"
        )
    if not state.admitter.tokens_allow():
        return f"the queue holds {ledger.queue_tokens} of {state.settings.max_queue_tokens} tokens"
    return "other replicas have not pulled yet" if state.bound.synchronous else "nothing"


def _whereabouts(entry: Entry) -> str:
    return f"on replica {entry.replica}" if entry.replica else "waiting for a replica"
