"""The replay room as one object: ledger, bound, order, buffer and journal together. No clock and no waiting.

The actor's shell calls these methods one at a time and does the waiting. What a method changed is in the journal
when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from forge_async.core.errors import ForgeError, StalenessError
from forge_async.core.records import Group
from forge_async.replay import events as ev
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.ages import Ages, ages, check_ages
from forge_async.replay.bound import UNLIMITED, effective, tokens_allow
from forge_async.replay.buffer import Buffer
from forge_async.replay.entry import Effect, Entry, State
from forge_async.replay.events import Event
from forge_async.replay.journal import Journal
from forge_async.replay.ledger import Ledger
from forge_async.replay.order import select
from forge_async.replay.settings import AsyncSettings


class ReplayState:
    """Everything the replay actor owns. Calls are idempotent by group index and by step."""

    def __init__(
        self,
        *,
        settings: AsyncSettings,
        groups_per_step: int,
        prompts: Prompts,
        tokens_guess: int,
        num_steps: int | None = None,
        journal: Journal | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Begin a run; `resume` goes on with one.

        Args:
            settings: the dials; ConfigError for a combination that cannot work.
            groups_per_step: P.
            prompts: where prompts come from.
            tokens_guess: tokens that a group is expected to have before the first one is ready.
            num_steps: steps of the whole run, so that no group is admitted that no step will take; None: endless.
            journal: where events are kept; None: nowhere, and the run cannot be resumed.
            ledger: internal to `resume`.
        """
        self.bound = effective(settings, groups_per_step)
        self.settings = settings
        self.prompts = prompts
        self.ledger = ledger or Ledger(tokens_guess)
        self.num_steps = num_steps
        self.buffer = Buffer()
        self.last_ages: Ages = ages([], 0, [])
        self.num_changes = 0
        """Calls of `_apply` that changed or counted something, so that those who wait can tell when to look again."""
        self.num_stale = 0
        """Groups that were older than the bound when their step came, since this object was made."""
        self._journal = journal
        self._unwritten: list[Event] = []
        self._batch: tuple[int, list[Group]] | None = None

    @classmethod
    def resume(
        cls,
        events: Sequence[Event],
        *,
        step: int,
        incarnation: int,
        settings: AsyncSettings,
        groups_per_step: int,
        prompts: Prompts,
        tokens_guess: int,
        num_steps: int | None = None,
        journal: Journal | None = None,
    ) -> ReplayState:
        """Go on from version `step` with the history in `events`; replicas join anew.

        Whatever was not trained by then waits again, under its index and prompt. Raises ForgeError when the history
        ends before that version.
        """
        num_attempts = sum(isinstance(event, ev.Started) for event in events)
        restored = ev.Restored(step=step, incarnation=incarnation, num_attempts=num_attempts)
        state = cls(
            settings=settings,
            groups_per_step=groups_per_step,
            prompts=prompts,
            tokens_guess=tokens_guess,
            num_steps=num_steps,
            journal=journal,
            ledger=Ledger.replay([*events, restored], tokens_guess),
        )
        if journal is not None:
            journal.append([restored])
        return state

    # Policy side.

    def admit(self, replica: str, max_groups: int) -> list[Admission]:
        """Give a replica up to `max_groups` groups: those that wait first, then new prompts, as the bound allows.

        At S = 0 a whole round is admitted at once, when nothing is waiting or in flight and every replica has pulled,
        and group i belongs to replica i modulo their number (in order of name): who asks when changes nothing.
        """
        with self._writing():
            version = self._version_of(replica)
            if self.ledger.closed:
                return []
            if self.bound.synchronous:
                self._open_round()
            given = self._give_waiting(replica, version, max_groups)
            while not self.bound.synchronous and len(given) < max_groups and self._may_admit(version):
                given.append(self._start(self._admit_next(), replica, version))
            return given

    def fair_share(self, replica: str) -> int:
        """Most groups to give a replica now so that the others are left theirs of what may be in flight.

        It is a matter of speed and not of the laws: `admit` gives more when it is asked for more. Without it, whoever
        pulls a version a moment before the others takes the whole room that a step freed, and makes the next batch
        alone. A replica that is slow to finish is given less, an idle one always gets one, and for one that is two
        publications behind nothing is kept.
        """
        ledger, version = self.ledger, self._version_of(replica)
        if self.bound.synchronous or not self.bound.bounded:
            return UNLIMITED
        free = max(self.bound.room(len(ledger.untaken), ledger.steps_unpulled(version)), 0)
        free += ledger.counts[State.WAITING] + ledger.counts[State.IN_FLIGHT]
        sharers = sum(step >= version - self.bound.publish_every for step in ledger.replicas.values())
        return -(-free // sharers) - ledger.in_flight[replica]

    def put(self, groups: Iterable[Group]) -> int:
        """Put scored groups into the buffer; returns how many of them were new.

        A repeated group changes nothing, a late one is counted and dropped. Raises StalenessError for a group that
        was never admitted, or that contradicts what came before under its index.
        """
        with self._writing():
            return sum([self._put_one(group) for group in groups])

    def end(self, index: int, outcome: str, reason: str, attempt: int | None = None) -> bool:
        """End a group without training on it; its slot is free at once. Returns whether that changed anything.

        Args:
            index: the group.
            outcome: `filtered`, `failed`, `expired` or `cancelled`.
            reason: a word or two for people, such as `zero_variance`.
            attempt: the try that speaks, from its Admission; a try that is no longer awaited ends nothing.
        """
        with self._writing():
            entry = self.ledger.entries.get(index)
            if attempt is not None and entry is not None and attempt != entry.attempt:
                self._apply(ev.Discarded(index=index, reason=f"{outcome} ({reason}) of an old try"))
                return False
            changed = self._apply(ev.Ended(index=index, outcome=outcome, reason=reason)) is Effect.CHANGED
            if changed:
                self.buffer.drop(index)
            return changed

    def pulled(self, replica: str, step: int) -> None:
        """A replica says that all tokens that it makes from now on are of version `step` or newer."""
        with self._writing():
            self._apply(ev.Pulled(replica=replica, step=step))

    def add_replica(self, replica: str, step: int) -> None:
        """A replica that serves version `step` joins."""
        with self._writing():
            self._apply(ev.ReplicaJoined(replica=replica, step=step))

    def remove_replica(self, replica: str) -> None:
        """A replica is gone. What it had in flight waits for another, under the same index and prompt."""
        with self._writing():
            self._apply(ev.ReplicaLeft(replica=replica))

    # Learner side.

    def take(self, step: int) -> list[Group] | None:
        """The P groups that step `step` trains on, sorted by admission index; None while there are not enough.

        Asking again gives the same batch until the next step is taken. Groups older than the bound (after a fault or
        a resume; the admission rule makes no others) are settled as `async.on_stale` says: made anew (`wait`), ended
        as expired (`drop`), let through (`reweight`), or StalenessError (`raise`).
        """
        if self._batch is not None and self._batch[0] == step:
            return self._batch[1]
        if step != self.ledger.next_step or self.ledger.closed:
            raise StalenessError(
                f"Step {step} asked for a batch, but step {self.ledger.next_step} takes next"
                + (" and the run is closed." if self.ledger.closed else ".")
            )
        with self._writing():
            while (indices := self._select()) is not None:
                stale = [index for index in indices if step - self.ledger.ready[index] > self.bound.max_staleness]
                self.num_stale += len(stale)
                if not stale or self.settings.on_stale == "reweight":
                    return self._consume(step, indices)
                if self.settings.on_stale == "raise":
                    check_ages([self.buffer[index] for index in stale], step, self.bound.max_staleness)
                self._settle(stale)
            return None

    def trained(self, step: int) -> None:
        """Step `step` is done: its groups end as trained, and the learner is at version `step + 1`."""
        with self._writing():
            self._apply(ev.Trained(step=step))

    def published(self, step: int) -> None:
        """Version `step` can be pulled."""
        with self._writing():
            self._apply(ev.Published(step=step))

    def close(self, reason: str) -> None:
        """Cancel every group that has not ended; nothing is admitted or taken afterwards."""
        with self._writing():
            self._apply(ev.Closed(reason=reason))
            self.buffer = Buffer()

    # For people and metrics.

    def state(self) -> dict[str, float]:
        """Figures under the names of `metrics.jsonl`; ages are those of the batch taken last."""
        ledger, ended = self.ledger, self.ledger.outcomes
        return {
            "queue/depth": len(ledger.ready),
            "queue/waiting": ledger.counts[State.WAITING],
            "queue/in_flight": ledger.counts[State.IN_FLIGHT],
            "queue/capacity": self._capacity(),
            "queue/tokens": ledger.queue_tokens,
            "queue/bytes": self.buffer.num_bytes,
            "groups/admitted": ledger.num_admitted,
            **{f"groups/{outcome}": ended[outcome] for outcome in ev.OUTCOMES},
            "groups/late": ledger.num_late,
            "groups/requeued": ledger.num_requeued,
            "groups/stale": self.num_stale,
            **self.last_ages.metrics(),
        }

    def num_wanted(self) -> int:
        """Groups that the steps to come need beyond those that are untaken."""
        if self.num_steps is None:
            return UNLIMITED
        left = max(self.num_steps - self.ledger.next_step, 0)
        return left * self.bound.groups_per_step - len(self.ledger.untaken)

    def why_no_batch(self) -> str:
        """What the next step waits for, in one sentence without full stop."""
        ledger = self.ledger
        text = (
            f"step {ledger.next_step} needs {self.bound.groups_per_step} groups: {len(ledger.ready)} are ready, "
            f"{ledger.counts[State.IN_FLIGHT]} in flight, {ledger.counts[State.WAITING]} waiting for a replica"
        )
        blocked = next((ledger.entries[index] for index in ledger.untaken if index not in ledger.ready), None)
        if blocked is None:
            return text
        return f"{text}; the oldest that is missing is group {blocked.index} ({_whereabouts(blocked)})"

    def why_no_admission(self, replica: str) -> str:
        """What a replica that is given nothing waits for, in one sentence without full stop."""
        ledger, version = self.ledger, self._version_of(replica)
        num_untaken, behind = len(ledger.untaken), ledger.steps_unpulled(version)
        if ledger.closed:
            return "the run is closed"
        if self.num_wanted() <= 0 and not ledger.counts[State.WAITING]:
            return "the steps to come need no further group"
        if self.bound.synchronous and (ledger.counts[State.WAITING] or ledger.counts[State.IN_FLIGHT]):
            return f"at max_staleness=0 the round in progress must end first; {self.why_no_batch()}"
        if self.bound.room(num_untaken, behind) <= 0:
            return (
                f"{num_untaken} groups are untaken and {replica} at version {version} has not pulled the result of "
                f"{behind} steps; depth {self.bound.depth} is used up until the learner takes or {replica} pulls"
            )
        if not self._tokens_allow():
            return f"the queue holds {ledger.queue_tokens} of {self.settings.max_queue_tokens} tokens"
        if self.bound.synchronous:
            return "other replicas have not pulled yet"
        return f"{replica} has {ledger.in_flight[replica]} groups in flight; the room that is left is for others"

    # Parts of the above.

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Journal what the body applied, also when it raised half way, and check conservation."""
        try:
            yield
        finally:
            unwritten, self._unwritten = self._unwritten, []
            if self._journal is not None:
                self._journal.append(unwritten)
        self.ledger.check()

    def _apply(self, event: Event) -> Effect:
        effect = self.ledger.apply(event)
        if effect is not Effect.REPEATED:
            self.num_changes += 1
            self._unwritten.append(event)
        return effect

    def _version_of(self, replica: str) -> int:
        version = self.ledger.replicas.get(replica)
        if version is None:
            raise ForgeError(f"Replica {replica!r} has not joined the replay actor; call add_replica first.")
        return version

    def _open_round(self) -> None:
        """At S = 0: admit as many groups as the next batch lacks, if all is quiet and every replica is up to date."""
        ledger = self.ledger
        quiet = not ledger.counts[State.WAITING] and not ledger.counts[State.IN_FLIGHT]
        if quiet and all(step == ledger.next_step for step in ledger.replicas.values()):
            for _ in range(min(self.bound.groups_per_step - len(ledger.untaken), self.num_wanted())):
                self._admit_next()

    def _give_waiting(self, replica: str, version: int, max_groups: int) -> list[Admission]:
        ledger, given = self.ledger, []
        unpulled = ledger.steps_unpulled(version)
        for index in ledger.waiting():
            if len(given) >= max_groups or self.bound.room(ledger.num_ahead(index), unpulled) <= 0:
                break
            if ledger.entries[index].floor <= version and self._may_own(index, replica):
                given.append(self._start(index, replica, version))
        return given

    def _may_own(self, index: int, replica: str) -> bool:
        if not self.bound.synchronous:
            return True
        names = sorted(self.ledger.replicas)
        return names[index % len(names)] == replica

    def _may_admit(self, version: int) -> bool:
        room = self.bound.room(len(self.ledger.untaken), self.ledger.steps_unpulled(version))
        return room > 0 and self.num_wanted() > 0 and self._tokens_allow()

    def _tokens_allow(self) -> bool:
        ledger = self.ledger
        return tokens_allow(
            len(ledger.untaken),
            ledger.queue_tokens,
            round(ledger.mean_tokens),
            self.settings.max_queue_tokens,
            self.bound.groups_per_step,
        )

    def _admit_next(self) -> int:
        index = self.ledger.num_admitted
        prompt_id = self.prompts.after(self.ledger.last_prompt)
        self._apply(ev.Admitted(index=index, prompt_id=prompt_id, num_tokens=round(self.ledger.mean_tokens)))
        return index

    def _start(self, index: int, replica: str, version: int) -> Admission:
        self._apply(ev.Started(index=index, replica=replica, step=version))
        entry = self.ledger.entries[index]
        return Admission(index=index, prompt_id=entry.prompt_id, min_step=entry.floor, attempt=entry.attempt)

    def _put_one(self, group: Group) -> bool:
        if not len(group.samples):
            raise StalenessError(f"Group {group.index} has no samples: end it as filtered or failed instead.")
        entry = self.ledger.entries.get(group.index)
        prompt_id = group.prompt_id if entry is None else entry.prompt_id
        if prompt_id != group.prompt_id and not self.ledger.restores:
            raise StalenessError(f"Group {group.index} is of prompt {prompt_id}, not of {group.prompt_id}.")
        if prompt_id != group.prompt_id or self.ledger.is_dead(group.samples.versions):
            self._discard(group.index)
            return False
        effect = self._apply(
            ev.Ready(index=group.index, num_tokens=group.samples.num_tokens, oldest_step=group.oldest_step())
        )
        if effect is Effect.CHANGED:
            self.buffer.put(group)
        return effect is Effect.CHANGED

    def _discard(self, index: int) -> None:
        """Throw a result away; should it have been the awaited one, the group is made anew rather than lost."""
        reason = "made by weights that a restore left behind"
        self._apply(ev.Discarded(index=index, reason=reason))
        entry = self.ledger.entries.get(index)
        if entry is not None and entry.state is State.IN_FLIGHT:
            self._apply(ev.Requeued(index=index, reason=reason))

    def _select(self) -> tuple[int, ...] | None:
        return select(
            self.ledger.untaken,
            self.ledger.ready,
            window=self.bound.window,
            groups_per_step=self.bound.groups_per_step,
            order=self.settings.order,
        )

    def _consume(self, step: int, indices: tuple[int, ...]) -> list[Group]:
        """Record the batch and hand it out, after looking at the age of every sample in it (Law 2)."""
        batch = [self.buffer[index] for index in indices]
        self.last_ages = ages(batch, step, [self.ledger.entries[index].ready_at_step for index in indices])
        self._apply(ev.Taken(step=step, indices=indices))
        self.buffer.drop_all(indices)
        self._batch = (step, batch)
        return batch

    def _settle(self, stale: Sequence[int]) -> None:
        """Keep groups out that are too old: end them, or have them made anew."""
        for index in stale:
            if self.settings.on_stale == "drop":
                self._apply(ev.Ended(index=index, outcome="expired", reason="too_old"))
            else:
                self._apply(ev.Requeued(index=index, reason="too_old"))
            self.buffer.drop(index)

    def _capacity(self) -> int:
        """Depth in groups; for `stream` what the token cap holds at the present mean."""
        if self.bound.depth < UNLIMITED:
            return self.bound.depth
        by_tokens = int(self.settings.max_queue_tokens / max(self.ledger.mean_tokens, 1.0))
        return max(self.bound.groups_per_step, by_tokens)


def _whereabouts(entry: Entry) -> str:
    return f"on replica {entry.replica}" if entry.replica else "waiting for a replica"
