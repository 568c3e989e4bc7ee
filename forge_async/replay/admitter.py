"""Which groups a replica is given: those that wait first, then new prompts, as the bounds and the caps allow."""

from __future__ import annotations

from collections.abc import Callable

from forge_async.core.errors import ForgeError
from forge_async.replay import events as ev
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.bound import UNLIMITED, tokens_allow
from forge_async.replay.entry import Effect, State
from forge_async.replay.events import Event
from forge_async.replay.generating import Generating
from forge_async.replay.lanes import Lane, Lanes
from forge_async.replay.ledger import Ledger
from forge_async.replay.routing import Routing
from forge_async.replay.settings import AsyncSettings


class Admitter:
    """The policy side of the room. It reads the ledger and changes it through `apply` only."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        lanes: Lanes,
        settings: AsyncSettings,
        prompts: Prompts,
        num_steps: int | None,
        groups_at_once: int | None,
        apply: Callable[[Event], Effect],
    ) -> None:
        self.lanes = lanes
        self.generating = Generating(ledger, groups_at_once)
        self.routing = Routing(lanes.groups_per_step)
        self._ledger, self._settings, self._prompts = ledger, settings, prompts
        self._num_steps, self._apply = num_steps, apply

    def admit(self, replica: str, max_groups: int) -> list[Admission]:
        """Up to `max_groups` groups for a replica; none when the run is closed."""
        version = self.version_of(replica)
        if self._ledger.closed:
            return []
        self._give_up()
        if self.lanes.synchronous:
            self._open_round()
        given: list[Admission] = []
        for lane in self.lanes:
            given += self._give(lane, replica, version, max_groups - len(given))
        return given

    def version_of(self, replica: str) -> int:
        """The version that a replica has pulled. Raises ForgeError for one that never joined."""
        version = self._ledger.replicas.get(replica)
        if version is None:
            raise ForgeError(f"Replica {replica!r} has not joined the replay actor; call add_replica first.")
        return version

    def num_wanted(self, lane: Lane) -> int:
        """Groups of a lane that the steps to come need beyond those that are untaken; 0 or less: none."""
        if self._num_steps is None:
            return UNLIMITED
        left = max(self._num_steps - self._ledger.next_step, 0)
        return left * lane.bound.groups_per_step - self._ledger.num_untaken(lane.fresh)

    def room(self, lane: Lane, version: int) -> int:
        """New groups of a lane for which there is room at a version; 0 or less: none."""
        return lane.bound.room(self._ledger.num_untaken(lane.fresh), self._ledger.steps_unpulled(version))

    def fair_share(self, lane: Lane, replica: str) -> int:
        """How many groups a replica should have in flight, by its speed; at S = 0 the index decides instead.

        What it shares with others is what is in flight, waits, or could be admitted at its version. Others are those
        that serve its version or will at their next pull: one that is further behind is not waited for. A fresh group
        is shared among the fresh alone, any other with regard to all that a replica has to do.
        """
        ledger, version = self._ledger, self.version_of(replica)
        if self.lanes.synchronous or len(ledger.replicas) == 1:
            return UNLIMITED
        oldest = version - self.lanes.normal.bound.publish_every
        rivals = [name for name, step in ledger.replicas.items() if name != replica and step >= oldest]
        loads = ledger.fresh_in_flight if lane.fresh else ledger.in_flight
        in_flight = sum(loads[name] for name in (replica, *rivals))
        waiting = sum(ledger.entries[index].fresh is lane.fresh for index in ledger.waiting())
        return self.routing.fair_share(replica, rivals, in_flight + waiting + self._num_admissible(lane, version))

    def load(self, lane: Lane, replica: str) -> int:
        """Groups in flight with a replica that count against its fair share of a lane."""
        return (self._ledger.fresh_in_flight if lane.fresh else self._ledger.in_flight)[replica]

    def engine_room(self, lane: Lane, replica: str) -> int:
        """Groups that the replica's engine can use before it has made some; a fresh group goes before others there."""
        return UNLIMITED if lane.fresh or self.lanes.synchronous else self.generating.room(replica)

    def tokens_allow(self, lane: Lane, num_more: int = 0) -> bool:
        """Whether the token cap lets one more group into a lane, after `num_more` others."""
        ledger = self._ledger
        estimate = round(ledger.mean_tokens)
        return tokens_allow(
            ledger.num_untaken(lane.fresh) + num_more,
            ledger.queue_tokens + num_more * estimate,
            estimate,
            self._settings.max_queue_tokens,
            lane.bound.groups_per_step,
        )

    def _give(self, lane: Lane, replica: str, version: int, max_groups: int) -> list[Admission]:
        most = min(max_groups, self.engine_room(lane, replica))
        most = min(most, self.fair_share(lane, replica) - self.load(lane, replica)) if most > 0 else 0
        given = self._give_waiting(lane, replica, version, most)
        if not self.lanes.synchronous:
            for _ in range(self._num_new(lane, version, most - len(given))):
                given.append(self._start(self._admit_next(lane), replica, version))
        return given

    def _num_admissible(self, lane: Lane, version: int) -> int:
        """How many new groups there is room for, by depth, by tokens and by the steps to come."""
        ledger = self._ledger
        tokens_left = self._settings.max_queue_tokens - ledger.queue_tokens
        lacking = lane.bound.groups_per_step - ledger.num_untaken(lane.fresh)
        by_tokens = max(int(tokens_left / max(ledger.mean_tokens, 1.0)), lacking)
        return max(0, min(self.room(lane, version), by_tokens, self.num_wanted(lane)))

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
        ledger, lane = self._ledger, self.lanes.normal
        quiet = not ledger.counts[State.WAITING] and not ledger.counts[State.IN_FLIGHT]
        if quiet and all(step == ledger.next_step for step in ledger.replicas.values()):
            for _ in range(min(lane.bound.groups_per_step - len(ledger.untaken), self.num_wanted(lane))):
                self._admit_next(lane)

    def _give_waiting(self, lane: Lane, replica: str, version: int, max_groups: int) -> list[Admission]:
        ledger, given = self._ledger, []
        unpulled = ledger.steps_unpulled(version)
        for index in ledger.waiting():
            entry = ledger.entries[index]
            if entry.fresh is not lane.fresh:
                continue
            if len(given) >= max_groups or lane.bound.room(ledger.num_ahead(index), unpulled) <= 0:
                break
            if entry.floor <= version and self._may_own(index, replica):
                given.append(self._start(index, replica, version))
        return given

    def _may_own(self, index: int, replica: str) -> bool:
        if not self.lanes.synchronous:
            return True
        names = sorted(self._ledger.replicas)
        return names[index % len(names)] == replica

    def _num_new(self, lane: Lane, version: int, most: int) -> int:
        """How many new groups may be started now; 0 or less: none."""
        most = min(most, self.room(lane, version), self.num_wanted(lane))
        return next((num for num in range(most) if not self.tokens_allow(lane, num)), most)

    def _admit_next(self, lane: Lane) -> int:
        """Admit the next prompt whose tries were not used up before the run was resumed."""
        while True:
            index = self._ledger.num_admitted
            prompt_id = self._prompts.after(self._ledger.last_prompt)
            num_tokens = round(self._ledger.mean_tokens)
            self._apply(ev.Admitted(index=index, prompt_id=prompt_id, num_tokens=num_tokens, fresh=lane.fresh))
            if not self._give_up_one(index):
                return index

    def _start(self, index: int, replica: str, version: int) -> Admission:
        self._apply(ev.Started(index=index, replica=replica, step=version))
        entry = self._ledger.entries[index]
        return Admission(
            index=index, prompt_id=entry.prompt_id, min_step=entry.floor, attempt=entry.attempt, fresh=entry.fresh
        )
