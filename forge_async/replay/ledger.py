"""Who is where: every admitted group's state as a fold over events (Law 1). `apply` is the only way to change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forge_async.core.errors import StalenessError
from forge_async.replay import events as ev
from forge_async.replay.book import Book
from forge_async.replay.entry import UNTAKEN, Effect, Entry, State
from forge_async.replay.events import Event
from forge_async.replay.history import surviving

KEEP_ENDED = 4096
"""Ended groups are forgotten (but stay counted) when this many newer indices have been admitted."""


class Ledger(Book):
    """The books as a fold over events. Change them only through `apply`."""

    @classmethod
    def replay(cls, events: Iterable[Event], tokens_guess: int = 1) -> Ledger:
        """Fold the surviving history of `events` from the empty ledger."""
        ledger = cls(tokens_guess)
        for event in surviving(events):
            ledger.apply(event)
        return ledger

    def apply(self, event: Event) -> Effect:
        """Fold one event in.

        Repeating an event changes nothing. A result of a group that had ended otherwise, or of a slower try, is
        counted and ignored. Raises StalenessError for an event that contradicts what the ledger knows.
        """
        return _HANDLERS[type(event)](self, event)

    # Events of a group.

    def _admitted(self, event: ev.Admitted) -> Effect:
        if event.index < self.num_admitted:
            return Effect.REPEATED
        if event.index > self.num_admitted:
            raise StalenessError(f"Group {event.index} was admitted, but the next is {self.num_admitted}.")
        self.num_admitted += 1
        self.last_prompt = event.prompt_id
        self.entries[event.index] = Entry(
            index=event.index,
            prompt_id=event.prompt_id,
            fresh=event.fresh,
            max_staleness=0 if event.fresh else self.max_staleness,
            num_tokens=event.num_tokens,
            num_failed_tries=self.failed_before.pop(event.index, 0),
        )
        self.untaken.append(event.index)
        if event.fresh:
            self.fresh.append(event.index)
        self.counts[State.WAITING] += 1
        self.queue_tokens += event.num_tokens
        self._forget(event.index - KEEP_ENDED)
        return Effect.CHANGED

    def _started(self, event: ev.Started) -> Effect:
        entry = self._known(event.index)
        if entry.state is State.IN_FLIGHT and entry.replica == event.replica:
            return Effect.REPEATED
        if entry.state is not State.WAITING or event.replica not in self.replicas:
            raise StalenessError(f"Group {event.index} is {entry.state}: it cannot be given to {event.replica}.")
        self._move(entry, State.IN_FLIGHT)
        entry.replica, entry.floor = event.replica, event.step
        entry.max_staleness = 0 if entry.fresh else self.max_staleness
        self._count_in_flight(entry, 1)
        entry.num_starts += 1
        self.num_attempts += 1
        entry.attempt = self.num_attempts
        return Effect.CHANGED

    def _requeued(self, event: ev.Requeued) -> Effect:
        entry = self._known(event.index)
        if entry.state is State.WAITING:
            return Effect.REPEATED
        if entry.state not in UNTAKEN:
            raise StalenessError(f"Group {event.index} is {entry.state}: it cannot wait again.")
        entry.num_failed_tries += 1
        self._wait_again(entry)
        return Effect.CHANGED

    def _ready(self, event: ev.Ready) -> Effect:
        entry = self._find(event.index)
        if entry is None:
            return self._late()
        if entry.state not in (State.WAITING, State.IN_FLIGHT):
            return self._repeated_ready(entry, event)
        self._move(entry, State.READY)
        self.queue_tokens += event.num_tokens - entry.num_tokens
        entry.num_tokens, entry.oldest_step = event.num_tokens, event.oldest_step
        entry.ready_at_step, entry.attempt = self.num_trained, 0
        self.ready[entry.index] = entry.oldest_step
        self.mean_tokens += (event.num_tokens - self.mean_tokens) / 32
        return Effect.CHANGED

    def _repeated_ready(self, entry: Entry, event: ev.Ready) -> Effect:
        if (entry.num_tokens, entry.oldest_step) == (event.num_tokens, event.oldest_step):
            return Effect.REPEATED
        if self._may_be_late(entry):
            return self._late()
        raise StalenessError(
            f"Group {entry.index} is {entry.state} with {entry.num_tokens} tokens from version {entry.oldest_step}, "
            f"and came again with {event.num_tokens} from version {event.oldest_step}: two rollouts share one index."
        )

    def _discarded(self, event: ev.Discarded) -> Effect:
        return self._late()

    def _ended(self, event: ev.Ended) -> Effect:
        if event.outcome not in ev.OUTCOMES or event.outcome == "trained":
            raise StalenessError(f"Group {event.index} cannot end as {event.outcome!r} by itself.")
        entry = self._find(event.index)
        if entry is None:
            return self._late()
        if entry.state is State.ENDED and (entry.outcome, entry.reason) == (event.outcome, event.reason):
            return Effect.REPEATED
        if entry.state in UNTAKEN:
            self._end(entry, event.outcome, event.reason)
            return Effect.CHANGED
        if self._may_be_late(entry):
            return self._late()
        raise StalenessError(
            f"Group {entry.index} is {entry.state} {entry.outcome} and cannot end as {event.outcome} ({event.reason})."
        )

    # Events of a step.

    def _taken(self, event: ev.Taken) -> Effect:
        if event.step < self.next_step:
            if self.taken.get(event.step, event.indices) != event.indices:
                raise StalenessError(f"Step {event.step} took other groups before.")
            return Effect.REPEATED
        if event.step > self.next_step or not all(index in self.ready for index in event.indices):
            raise StalenessError(f"Step {event.step} cannot take {event.indices}: step {self.next_step} takes next.")
        for index in event.indices:
            self._move(self.entries[index], State.TAKEN)
        self.taken[event.step] = event.indices
        self.next_step += 1
        return Effect.CHANGED

    def _trained(self, event: ev.Trained) -> Effect:
        if event.step < self.num_trained:
            return Effect.REPEATED
        if event.step > self.num_trained or event.step not in self.taken:
            raise StalenessError(f"Step {event.step} cannot be done: step {self.num_trained} is next, if it was taken.")
        for index in self.taken.pop(event.step):
            self._end(self.entries[index], "trained", "")
        self.num_trained += 1
        return Effect.CHANGED

    def _published(self, event: ev.Published) -> Effect:
        if event.step <= self.published:
            return Effect.REPEATED
        if event.step > self.num_trained:
            raise StalenessError(f"Version {event.step} cannot be published: the learner is at {self.num_trained}.")
        self.published = event.step
        return Effect.CHANGED

    def _restored(self, event: ev.Restored) -> Effect:
        if event.step != self.num_trained:
            raise StalenessError(
                f"The ledger cannot go on from version {event.step}: it knows of {self.num_trained} steps done."
            )
        self.restores.append((event.incarnation, event.step))
        self.failed_before = dict(event.failed_tries)
        for entry in self.entries.values():
            entry.num_failed_tries = self.failed_before.pop(entry.index, 0)
            if entry.state is not State.ENDED:
                self._wait_again(entry)
            if entry.fresh and not event.fresh_lane:
                entry.fresh, entry.max_staleness = False, self.max_staleness
        self.untaken = sorted(index for index, entry in self.entries.items() if entry.state is State.WAITING)
        self.fresh = [index for index in self.untaken if self.entries[index].fresh]
        self.taken.clear()
        self.replicas.clear()
        self.num_attempts = event.num_attempts
        self.next_step = self.published = event.step
        return Effect.CHANGED

    def _bound_set(self, event: ev.BoundSet) -> Effect:
        if event.max_staleness == self.max_staleness:
            return Effect.REPEATED
        self.max_staleness = event.max_staleness
        return Effect.CHANGED

    def _closed(self, event: ev.Closed) -> Effect:
        if self.closed:
            return Effect.REPEATED
        self.closed = True
        self.taken.clear()
        for entry in [entry for entry in self.entries.values() if entry.state is not State.ENDED]:
            self._end(entry, "cancelled", event.reason)
        return Effect.CHANGED

    # Events of a replica.

    def _joined(self, event: ev.ReplicaJoined) -> Effect:
        if self.replicas.get(event.replica) == event.step:
            return Effect.REPEATED
        if event.replica in self.replicas:
            raise StalenessError(f"Replica {event.replica} is here already; remove it before its successor joins.")
        self._check_published(event.replica, event.step)
        self.replicas[event.replica] = event.step
        return Effect.CHANGED

    def _left(self, event: ev.ReplicaLeft) -> Effect:
        if self.replicas.pop(event.replica, None) is None:
            return Effect.REPEATED
        for index in self.untaken:
            entry = self.entries[index]
            if entry.state is not State.IN_FLIGHT or entry.replica != event.replica:
                continue
            if index in event.made:
                self._needs_no_replica(entry)
                continue
            entry.num_failed_tries += 1
            self._wait_again(entry)
        self.in_flight.pop(event.replica, None)
        self.fresh_in_flight.pop(event.replica, None)
        return Effect.CHANGED

    def _pulled(self, event: ev.Pulled) -> Effect:
        before = self.replicas.get(event.replica)
        if before == event.step:
            return Effect.REPEATED
        if before is None or event.step < before:
            raise StalenessError(
                f"Replica {event.replica} reports version {event.step}, but "
                + ("it never joined." if before is None else f"it had {before}; versions of a replica only grow.")
            )
        self._check_published(event.replica, event.step)
        self.replicas[event.replica] = event.step
        return Effect.CHANGED

    # Parts of the above.

    def _check_published(self, replica: str, step: int) -> None:
        if step > self.published:
            raise StalenessError(f"Replica {replica} reports version {step}; the newest published is {self.published}.")

    def _find(self, index: int) -> Entry | None:
        """The entry, or None for an index that was forgotten or that a restoring has undone."""
        entry = self.entries.get(index)
        if entry is None and index >= self.num_admitted and not self.restores:
            raise StalenessError(f"Group {index} was never admitted; the next is {self.num_admitted}.")
        return entry

    def _known(self, index: int) -> Entry:
        entry = self._find(index)
        if entry is None:
            raise StalenessError(f"Group {index} ended long ago, or was never admitted.")
        return entry

    def _may_be_late(self, entry: Entry) -> bool:
        """Whether a result that differs from what is known can come from another try, or after a deadline."""
        return entry.num_starts > 1 or bool(self.restores) or entry.outcome in ("failed", "expired", "cancelled")


_HANDLERS: dict[type[Any], Callable[[Ledger, Any], Effect]] = {
    ev.Admitted: Ledger._admitted,
    ev.Started: Ledger._started,
    ev.Requeued: Ledger._requeued,
    ev.Ready: Ledger._ready,
    ev.Discarded: Ledger._discarded,
    ev.Ended: Ledger._ended,
    ev.Taken: Ledger._taken,
    ev.Trained: Ledger._trained,
    ev.Published: Ledger._published,
    ev.ReplicaJoined: Ledger._joined,
    ev.ReplicaLeft: Ledger._left,
    ev.Pulled: Ledger._pulled,
    ev.Restored: Ledger._restored,
    ev.BoundSet: Ledger._bound_set,
    ev.Closed: Ledger._closed,
}
