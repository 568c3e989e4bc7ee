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
        "queue/fresh_depth": sum(index in ledger.ready for index in ledger.fresh),
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
        **({"staleness/bound": state.bound.max_staleness} if state.bound.bounded else {}),
        **state.last_ages.metrics(),
    }


def capacity(state: ReplayState) -> int:
    """Depth in groups; for `stream` what the token cap holds at the present mean."""
    lanes = state.admitter.lanes
    if lanes.depth < UNLIMITED:
        return lanes.depth
    by_tokens = int(state.settings.max_queue_tokens / max(state.ledger.mean_tokens, 1.0))
    return max(lanes.groups_per_step, by_tokens)


def why_no_batch(state: ReplayState) -> str:
    """What the next step waits for, in one sentence without full stop."""
    ledger, lanes = state.ledger, state.admitter.lanes
    text = (
        f"step {ledger.next_step} needs {lanes.groups_per_step} groups: {len(ledger.ready)} are ready, "
        f"{ledger.counts[State.IN_FLIGHT]} in flight, {ledger.counts[State.WAITING]} waiting for a replica"
    )
    if lanes.fresh is not None:
        num_ready, num = sum(index in ledger.ready for index in ledger.fresh), lanes.fresh.bound.groups_per_step
        text += f"; {num} must be fresh, made by version {ledger.next_step}, of which {num_ready} are ready"
        if num_ready < num and not any(step == ledger.next_step for step in ledger.replicas.values()):
            text += f" and which no replica has pulled (published: {ledger.published})"
    blocked = next((ledger.entries[index] for index in ledger.untaken if index not in ledger.ready), None)
    if blocked is None:
        return text
    return f"{text}; the oldest that is missing is group {blocked.index} ({_whereabouts(blocked)})"


def why_no_admission(state: ReplayState, replica: str) -> str:
    """What a replica that is given nothing waits for, in one sentence without full stop."""
    ledger, admitter, lane = state.ledger, state.admitter, state.admitter.lanes.normal
    version = admitter.version_of(replica)
    num_untaken, behind = ledger.num_untaken(lane.fresh), ledger.steps_unpulled(version)
    if ledger.closed:
        return "the run is closed"
    if state.num_wanted() <= 0 and not ledger.counts[State.WAITING]:
        return "the steps to come need no further group"
    if state.bound.synchronous and (ledger.counts[State.WAITING] or ledger.counts[State.IN_FLIGHT]):
        return f"at max_staleness=0 the round in progress must end first; {why_no_batch(state)}"
    if admitter.engine_room(lane, replica) <= 0:
        return f"{replica} has {ledger.in_flight[replica]} groups in flight and generates as many as its engine runs"
    if admitter.load(lane, replica) >= admitter.fair_share(lane, replica) > 0:
        return f"{replica} has {ledger.in_flight[replica]} groups in flight, as many as its measured speed is worth"
    if admitter.room(lane, version) <= 0:
        return (
            f"{num_untaken} groups are untaken and {replica} at version {version} has not pulled the result of "
            f"{behind} steps; depth {state.bound.depth} is used up until the learner takes or {replica} pulls"
        )
    if not admitter.tokens_allow(lane):
        return f"the queue holds {ledger.queue_tokens} of {state.settings.max_queue_tokens} tokens"
    return "other replicas have not pulled yet" if state.bound.synchronous else "nothing"


def _whereabouts(entry: Entry) -> str:
    if entry.replica:
        return f"on replica {entry.replica}"
    return "waiting for a replica" if entry.state is State.WAITING else "made by a replica that is gone, being scored"
