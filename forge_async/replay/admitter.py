"""Which groups a replica is given: those that wait first, then new prompts, as the bound and the caps allow."""

from __future__ import annotations

from collections.abc import Callable

from forge_async.core.errors import ForgeError
from forge_async.replay import events as ev
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.bound import UNLIMITED, Bound, tokens_allow
from forge_async.replay.entry import Effect, State
from forge_async.replay.events import Event
from forge_async.replay.ledger import Ledger
from forge_async.replay.routing import Routing
from forge_async.replay.settings import AsyncSettings


class Admitter:
    """The policy side of the room. It reads the ledger and changes it through `apply` only."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        bound: Bound,
        settings: AsyncSettings,
        prompts: Prompts,
        num_steps: int | None,
        apply: Callable[[Event], Effect],
    ) -> None:
        self.bound = bound
        self.routing = Routing(bound.groups_per_step)
        self._ledger, self._settings, self._prompts = ledger, settings, prompts
        self._num_steps, self._apply = num_steps, apply

    def admit(self, replica: str, max_groups: int) -> list[Admission]:
        """Up to `max_groups` groups for a replica; none when the run is closed."""
        version = self.version_of(replica)
        if self._ledger.closed:
            return []
        self._give_up()
        if self.bound.synchronous:
            self._open_round()
        most = min(max_groups, self.fair_share(replica) - self._ledger.in_flight[replica])
        given = self._give_waiting(replica, version, most)
        while not self.bound.synchronous and len(given) < most and self._may_admit(version):
            given.append(self._start(self._admit_next(), replica, version))
        return given

    def version_of(self, replica: str) -> int:
        """The version that a replica has pulled. Raises ForgeError for one that never joined."""
        version = self._ledger.replicas.get(replica)
        if version is None:
            raise ForgeError(f"Replica {replica!r} has not joined the replay actor; call add_replica first.")
        return version

    def num_wanted(self) -> int:
        """Groups that the steps to come need beyond those that are untaken."""
        if self._num_steps is None:
            return UNLIMITED
        left = max(self._num_steps - self._ledger.next_step, 0)
        return left * self.bound.groups_per_step - len(self._ledger.untaken)

    def fair_share(self, replica: str) -> int:
        """How many groups a replica should have in flight, by its speed; at S = 0 the index decides instead.

        What it shares with others is what is in flight, waits, or could be admitted at its version. Others are those
        that serve its version or will at their next pull: one that is further behind is not waited for.
        """
        ledger, version = self._ledger, self.version_of(replica)
        if self.bound.synchronous or len(ledger.replicas) == 1:
            return UNLIMITED
        rivals = [
            name
            for name, step in ledger.replicas.items()
            if name != replica and step >= version - self.bound.publish_every
        ]
        in_flight = sum(ledger.in_flight[name] for name in (replica, *rivals))
        return self.routing.fair_share(
            replica, rivals, in_flight + ledger.counts[State.WAITING] + self._num_admissible(version)
        )

    def _num_admissible(self, version: int) -> int:
        """How many new groups there is room for, by depth, by tokens and by the steps to come."""
        ledger, num_untaken = self._ledger, len(self._ledger.untaken)
        tokens_left = self._settings.max_queue_tokens - ledger.queue_tokens
        by_tokens = max(int(tokens_left / max(ledger.mean_tokens, 1.0)), self.bound.groups_per_step - num_untaken)
        room = self.bound.room(num_untaken, ledger.steps_unpulled(version))
        return max(0, min(room, by_tokens, self.num_wanted()))

    def tokens_allow(self) -> bool:
        """Whether the token cap lets one more group in."""
        ledger = self._ledger
        return tokens_allow(
            len(ledger.untaken),
            ledger.queue_tokens,
            round(ledger.mean_tokens),
            self._settings.max_queue_tokens,
            self.bound.groups_per_step,
        )

    def _give_up(self) -> None:
        """End waiting groups whose tries are used up, so that a run, resumed or not, never hangs on one of them."""
        for index in self._ledger.waiting():
            self._give_up_one(index)

    def _give_up_one(self, index: int) -> bool:
        used_up = self._ledger.entries[index].num_failed_tries >= self._settings.max_attempts
        if used_up:
            self._apply(ev.Ended(index=index, outcome="failed", reason="tries_used_up"))
        return used_up

    def _open_round(self) -> None:
        """At S = 0: admit as many groups as the next batch lacks, if all is quiet and every replica is up to date."""
        ledger = self._ledger
        quiet = not ledger.counts[State.WAITING] and not ledger.counts[State.IN_FLIGHT]
        if quiet and all(step == ledger.next_step for step in ledger.replicas.values()):
            for _ in range(min(self.bound.groups_per_step - len(ledger.untaken), self.num_wanted())):
                self._admit_next()

    def _give_waiting(self, replica: str, version: int, max_groups: int) -> list[Admission]:
        ledger, given = self._ledger, []
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
        names = sorted(self._ledger.replicas)
        return names[index % len(names)] == replica

    def _may_admit(self, version: int) -> bool:
        room = self.bound.room(len(self._ledger.untaken), self._ledger.steps_unpulled(version))
        return room > 0 and self.num_wanted() > 0 and self.tokens_allow()

    def _admit_next(self) -> int:
        """Admit the next prompt whose tries were not used up before the run was resumed."""
        while True:
            index = self._ledger.num_admitted
            prompt_id = self._prompts.after(self._ledger.last_prompt)
            self._apply(ev.Admitted(index=index, prompt_id=prompt_id, num_tokens=round(self._ledger.mean_tokens)))
            if not self._give_up_one(index):
                return index

    def _start(self, index: int, replica: str, version: int) -> Admission:
        self._apply(ev.Started(index=index, replica=replica, step=version))
        entry = self._ledger.entries[index]
        return Admission(index=index, prompt_id=entry.prompt_id, min_step=entry.floor, attempt=entry.attempt)
