"""The replay room as one object: ledger, bound, order, buffer and journal together. No clock and no waiting.

The actor's shell calls these methods one at a time and does the waiting. What a method changed is in the journal
when it returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from forge_async.core.errors import ConfigError, StalenessError
from forge_async.core.records import Group, oldest_steps
from forge_async.replay import describe
from forge_async.replay import events as ev
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.admitter import Admitter
from forge_async.replay.ages import Ages, ages, check_age
from forge_async.replay.bound import UNLIMITED, Bound, least_staleness
from forge_async.replay.buffer import Buffer
from forge_async.replay.entry import Effect, State
from forge_async.replay.events import Event
from forge_async.replay.fruitless import FruitlessRun
from forge_async.replay.history import failed_tries
from forge_async.replay.journal import Journal
from forge_async.replay.lanes import Lanes
from forge_async.replay.ledger import Ledger
from forge_async.replay.order import select
from forge_async.replay.settings import AUTO, AsyncSettings


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
        groups_at_once: int | None = None,
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
            groups_at_once: groups that a replica is given before it has generated some of them; None: as its share of
                the room allows. Whoever sets it calls `generated`.
            journal: where events are kept; None: nowhere, and the run cannot be resumed.
            ledger: internal to `resume`.
        """
        self.settings = settings
        self.ledger = ledger or Ledger(tokens_guess)
        self.admitter = Admitter(
            ledger=self.ledger,
            lanes=Lanes.of(settings, groups_per_step),
            settings=settings,
            prompts=prompts,
            num_steps=num_steps,
            groups_at_once=groups_at_once,
            apply=self._apply,
        )
        self.buffer = Buffer()
        self.last_ages: Ages = ages([], 0, [])
        self.num_changes = 0
        """Calls of `_apply` that changed or counted something, so that those who wait can tell when to look again."""
        self._ended: list[ev.Ended] = []
        """Ends that nobody outside asked for, since they were last taken."""
        self.num_stale = 0
        """Groups that were older than the bound when their step came, since this object was made."""
        self._fruitless = FruitlessRun(groups_per_step, settings.max_filtered_batches)
        self._journal = journal
        self._unwritten: list[Event] = []
        self._batch: tuple[int, list[Group]] | None = None
        self._begin()

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
        groups_at_once: int | None = None,
        journal: Journal | None = None,
    ) -> ReplayState:
        """Go on from version `step` with the history in `events`; replicas join anew.

        Whatever was not trained by then waits again, under its index and prompt. Raises ForgeError when the history
        ends before that version.
        """
        restored = ev.Restored(
            step=step,
            incarnation=incarnation,
            num_attempts=sum(isinstance(event, ev.Started) for event in events),
            failed_tries=tuple(sorted(failed_tries(events).items())),
            fresh_lane=bool(settings.fresh_fraction),
        )
        if journal is not None:
            journal.append([restored])
        return cls(
            settings=settings,
            groups_per_step=groups_per_step,
            prompts=prompts,
            tokens_guess=tokens_guess,
            num_steps=num_steps,
            groups_at_once=groups_at_once,
            journal=journal,
            ledger=Ledger.replay([*events, restored], tokens_guess),
        )

    # Policy side.

    def admit(self, replica: str, max_groups: int) -> list[Admission]:
        """Give a replica up to `max_groups` groups: those that wait first, then new prompts, as the bound allows.

        At S = 0 a whole round is admitted at once, when nothing is waiting or in flight and every replica has pulled,
        and group i belongs to replica i modulo their number (in order of name): who asks when changes nothing.
        Raises FilterStallError when `async.max_filtered_batches` batches of groups ended with none to train on.
        """
        with self._writing():
            self._fruitless.check()
            return self.admitter.admit(replica, max_groups)

    def generated(self, tries: Iterable[tuple[int, int]]) -> None:
        """All tokens of these groups, (index, attempt), are made and their rewards are on the way: so many others can
        be generated in their place, and they outlive their replica. Asked for with `groups_at_once`; a group that is
        put or ended says as much."""
        self.num_changes += self.admitter.generating.finished(tries)

    def put(self, groups: Iterable[Group]) -> int:
        """Put scored groups into the buffer; returns how many of them were new.

        A repeated group changes nothing, a late one is counted and dropped. Raises StalenessError for a group that
        was never admitted, or that contradicts what came before under its index.
        """
        groups = list(groups)
        with self._writing():
            return sum(map(self._put_one, groups, oldest_steps([group.samples for group in groups])))

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
            maker = entry.replica if entry is not None else ""
            changed = self._apply(ev.Ended(index=index, outcome=outcome, reason=reason)) is Effect.CHANGED
            if changed:
                self._ended.pop()
                self.buffer.drop(index)
                self._fruitless.ended(outcome, reason)
                if outcome == "filtered" and maker:
                    self.admitter.routing.made(maker)
            return changed

    def retry(self, index: int, reason: str, attempt: int) -> bool:
        """A try came to nothing: make the group anew, or end it as failed when `async.max_attempts` are used up.

        Args:
            index: the group.
            reason: a word or two for people, such as `reward_timeout`.
            attempt: the try that speaks, from its Admission; a try that is no longer awaited changes nothing.

        Returns: whether the group will be made anew.
        """
        entry = self.ledger.entries.get(index)
        if entry is None or attempt != entry.attempt or entry.num_failed_tries + 1 >= self.settings.max_attempts:
            self.end(index, "failed", reason, attempt)
            return False
        with self._writing():
            self._apply(ev.Requeued(index=index, reason=reason))
        return True

    def pulled(self, replica: str, step: int) -> None:
        """A replica says that all tokens that it makes from now on are of version `step` or newer."""
        with self._writing():
            self._apply(ev.Pulled(replica=replica, step=step))

    def add_replica(self, replica: str, step: int) -> None:
        """A replica that serves version `step` joins."""
        with self._writing():
            others = [name for name in self.ledger.replicas if name != replica]
            if self._apply(ev.ReplicaJoined(replica=replica, step=step)) is Effect.CHANGED:
                self.admitter.routing.joined(replica, others)

    def remove_replica(self, replica: str) -> None:
        """A replica is gone. What it had in flight waits for another, under the same index and prompt.

        A group whose tokens are all made (`generated`) stays in flight: its rewards need no replica.
        """
        with self._writing():
            self._apply(ev.ReplicaLeft(replica=replica, made=self.admitter.generating.made_by(replica)))
            self.admitter.routing.left(replica)

    # Learner side.

    def take(self, step: int) -> list[Group] | None:
        """The P groups that step `step` trains on, sorted by admission index; None while there are not enough.

        Asking again gives the same batch until the next step is taken. Groups older than the bound (after a fault or
        a resume; the admission rule makes no others) are settled as `async.on_stale` says: made anew (`wait`), ended
        as expired (`drop`), let through (`reweight`), or StalenessError (`raise`). Raises FilterStallError as `admit`.
        """
        if self._batch is not None and self._batch[0] == step:
            return self._batch[1]
        if step != self.ledger.next_step or self.ledger.closed:
            raise StalenessError(
                f"Step {step} asked for a batch, but step {self.ledger.next_step} takes next"
                + (" and the run is closed." if self.ledger.closed else ".")
            )
        with self._writing():
            self._fruitless.check()
            while (indices := self._select()) is not None:
                stale = [index for index in indices if self._is_stale(index, step)]
                self.num_stale += len(stale)
                if not stale or self.settings.on_stale == "reweight":
                    return self._consume(step, indices)
                if self.settings.on_stale == "raise":
                    check_age(self.buffer[stale[0]].group, step, self.ledger.entries[stale[0]].max_staleness)
                self._settle(stale)
            return None

    def trained(self, step: int) -> None:
        """The steps up to `step` are done: their groups end as trained, and the learner is at version `step + 1`."""
        with self._writing():
            for done in range(self.ledger.num_trained, step + 1):
                self._apply(ev.Trained(step=done))

    def published(self, step: int) -> None:
        """Version `step` can be pulled, so the steps that it comes after are done."""
        self.trained(step - 1)
        with self._writing():
            self._apply(ev.Published(step=step))

    def set_max_staleness(self, max_staleness: int) -> None:
        """Start groups under another S from here on; each group keeps the bound that it was started under.

        So S may fall below the age of what is under way: no group is older than its own bound, and none started from
        now on will be older than this one. Raises ConfigError when window, publishing or the cap forbid it.
        """
        if max_staleness > (highest := self.settings.highest_staleness or UNLIMITED):
            raise ConfigError(f"max_staleness={max_staleness} is above the greatest that this run allows, {highest}.")
        lanes = self.admitter.lanes.with_max_staleness(max_staleness)
        with self._writing():
            self._apply(ev.BoundSet(max_staleness=max_staleness))
            self.admitter.lanes = lanes

    def close(self, reason: str) -> None:
        """Cancel every group that has not ended; nothing is admitted or taken afterwards."""
        with self._writing():
            self._apply(ev.Closed(reason=reason))
            self.buffer = Buffer()

    # For people and metrics.

    def state(self) -> dict[str, float]:
        """Figures under the names of `metrics.jsonl`; ages are those of the batch taken last."""
        return describe.figures(self)

    def take_ended(self) -> list[tuple[int, str, str]]:
        """(index, outcome, reason) of the groups that the room ended by itself since the last call: too old to be
        trained on, or out of tries."""
        ended, self._ended = self._ended, []
        return [(event.index, event.outcome, event.reason) for event in ended]

    def num_wanted(self) -> int:
        """Groups that the steps to come need beyond those that are untaken."""
        return sum(max(self.admitter.num_wanted(lane), 0) for lane in self.admitter.lanes)

    def why_no_batch(self) -> str:
        """What the next step waits for, in one sentence without full stop."""
        return describe.why_no_batch(self)

    def why_no_admission(self, replica: str) -> str:
        """What a replica that is given nothing waits for, in one sentence without full stop."""
        return describe.why_no_admission(self, replica)

    @property
    def bound(self) -> Bound:
        """The bound in force for groups that need not be fresh."""
        return self.admitter.lanes.normal.bound

    # Parts of the above.

    def _begin(self) -> None:
        """Put the bound on record. `auto` goes on with the one before a resume, if it is legal still."""
        before, lanes = self.ledger.max_staleness, self.admitter.lanes
        if self.settings.buffer == "bounded" and self.settings.max_staleness == AUTO and before < UNLIMITED:
            bound = lanes.normal.bound
            least = least_staleness(bound.window, bound.groups_per_step, bound.publish_every)
            self.admitter.lanes = lanes.with_max_staleness(min(max(before, least), self.settings.max_staleness_cap))
        with self._writing():
            self._apply(ev.BoundSet(max_staleness=self.bound.max_staleness))

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
        if effect is Effect.CHANGED and isinstance(event, ev.Ended):
            self._ended.append(event)
        return effect

    def _put_one(self, group: Group, oldest_steps: np.ndarray) -> bool:
        if not len(group.samples):
            raise StalenessError(f"Group {group.index} has no samples: end it as filtered or failed instead.")
        entry = self.ledger.entries.get(group.index)
        prompt_id = group.prompt_id if entry is None else entry.prompt_id
        if prompt_id != group.prompt_id and not self.ledger.restores:
            raise StalenessError(f"Group {group.index} is of prompt {prompt_id}, not of {group.prompt_id}.")
        if prompt_id != group.prompt_id or self.ledger.is_dead(group.samples.versions):
            self._discard(group.index)
            return False
        maker = entry.replica if entry is not None else ""
        num_tokens, oldest_step = group.samples.num_tokens, min(oldest_steps.tolist())
        effect = self._apply(ev.Ready(index=group.index, num_tokens=num_tokens, oldest_step=oldest_step))
        if effect is Effect.CHANGED:
            self.buffer.put(group, oldest_steps)
            self._fruitless.ready()
            if maker:
                self.admitter.routing.made(maker)
        return effect is Effect.CHANGED

    def _discard(self, index: int) -> None:
        """Throw a result away; should it have been the awaited one, the group is made anew rather than lost."""
        reason = "made by weights that a restore left behind"
        self._apply(ev.Discarded(index=index, reason=reason))
        entry = self.ledger.entries.get(index)
        if entry is not None and entry.state is State.IN_FLIGHT:
            self._apply(ev.Requeued(index=index, reason=reason))

    def _select(self) -> tuple[int, ...] | None:
        """The next batch: each lane's part of it, or None while one of them lacks."""
        picked: list[int] = []
        for lane in self.admitter.lanes:
            part = select(
                self.ledger.untaken_of(lane.fresh),
                self.ledger.ready,
                window=lane.bound.window,
                groups_per_step=lane.bound.groups_per_step,
                order="fifo" if lane.fresh else self.settings.order,
            )
            if part is None:
                return None
            picked += part
        return tuple(sorted(picked))

    def _is_stale(self, index: int, step: int) -> bool:
        return step - self.ledger.ready[index] > self.ledger.entries[index].max_staleness

    def _consume(self, step: int, indices: tuple[int, ...]) -> list[Group]:
        """Record the batch and hand it out, after looking at the age of every sample in it (Law 2)."""
        oldest_steps = [self.buffer[index].oldest_steps for index in indices]
        self.last_ages = ages(oldest_steps, step, [self.ledger.entries[index].ready_at_step for index in indices])
        self._apply(ev.Taken(step=step, indices=indices))
        batch = self.buffer.drop_all(indices)
        self._batch = (step, batch)
        return batch

    def _settle(self, stale: Sequence[int]) -> None:
        """Keep groups out that are too old: end them, or have them made anew."""
        for index in stale:
            expired = ev.Ended(index=index, outcome="expired", reason="too_old")
            self._apply(expired if self.settings.on_stale == "drop" else ev.Requeued(index=index, reason="too_old"))
            self.buffer.drop(index)
