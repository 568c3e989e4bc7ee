"""The ledger's books: what is known of groups, replicas and steps, and how a group moves from state to state.

`ledger.py` says which event moves what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from forge_async.core.errors import StalenessError
from forge_async.core.records import PromptId
from forge_async.core.versions import VersionRuns
from forge_async.replay.bound import UNLIMITED
from forge_async.replay.conservation import recount
from forge_async.replay.entry import UNTAKEN, Effect, Entry, State


class Book:
    """States of groups, replicas and steps. Read what you like; only the ledger changes it."""

    def __init__(self, tokens_guess: int = 1) -> None:
        """`tokens_guess`: tokens that a group is expected to have before the first one is ready."""
        self.entries: dict[int, Entry] = {}
        self.untaken: list[int] = []
        """Sorted indices of groups waiting, in flight or ready."""
        self.fresh: list[int] = []
        """Those of `untaken` that go through the fresh lane, sorted."""
        self.ready: dict[int, int] = {}
        """Step of the oldest token of each ready group."""
        self.taken: dict[int, tuple[int, ...]] = {}
        """Groups of each step that is taken and not trained."""
        self.counts: Counter[State] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[tuple[str, str]] = Counter()
        """Ended groups by (outcome, reason), but for the trained."""
        self.num_admitted = 0
        self.num_late = 0
        self.num_requeued = 0
        self.last_prompt: PromptId | None = None
        self.queue_tokens = 0
        """Tokens of untaken groups, estimated where they are not ready."""
        self.mean_tokens = float(tokens_guess)
        """Running mean of the tokens of groups that became ready."""
        self.num_attempts = 0
        """Groups given to replicas so far, lost histories included."""
        self.next_step = 0
        """The step that takes next."""
        self.num_trained = 0
        """Steps done: the learner's version."""
        self.published = 0
        """Newest published version."""
        self.replicas: dict[str, int] = {}
        """Version that each live replica has pulled."""
        self.in_flight: Counter[str] = Counter()
        """Groups in flight with each replica; with "" those that were made by one that is gone."""
        self.fresh_in_flight: Counter[str] = Counter()
        """Those of them that go through the fresh lane."""
        self.max_staleness = UNLIMITED
        """S in force, in steps."""
        self.closed = False
        self.restores: list[tuple[int, int]] = []
        """(incarnation, step) of each restoring."""
        self.failed_before: dict[int, int] = {}
        """Failed tries, before the last restoring, of groups that are yet to be admitted again."""

    def check(self, deep: bool = False) -> None:
        """Raise StalenessError unless every admitted group is in exactly one state (Law 1).

        `deep` recounts the groups one by one instead of trusting the counters; for tests.
        """
        counted = sum(self.counts[state] for state in State)
        untaken = sum(self.counts[state] for state in UNTAKEN)
        ended = sum(self.outcomes.values())
        good = counted == self.num_admitted and untaken == len(self.untaken) and ended == self.counts[State.ENDED]
        if good and deep:
            good = recount(self)
        if not good:
            raise StalenessError(
                f"Conservation is broken: admitted {self.num_admitted}, but {dict(self.counts)} with "
                f"{len(self.untaken)} untaken and {ended} outcomes; this is a bug in forge_async, please report it."
            )

    def num_ahead(self, index: int) -> int:
        """Untaken groups of its lane that were admitted before the untaken group `index`."""
        num_fresh = bisect_left(self.fresh, index)
        return num_fresh if self.entries[index].fresh else bisect_left(self.untaken, index) - num_fresh

    def num_untaken(self, fresh: bool) -> int:
        """Untaken groups of a lane."""
        return len(self.fresh) if fresh else len(self.untaken) - len(self.fresh)

    def untaken_of(self, fresh: bool) -> list[int]:
        """Sorted indices of the untaken groups of a lane."""
        if fresh or not self.fresh:
            return self.fresh if fresh else self.untaken
        return [index for index in self.untaken if not self.entries[index].fresh]

    def steps_unpulled(self, step: int) -> int:
        """Steps that have taken a batch and whose result a replica at version `step` has not pulled."""
        return self.next_step - step

    def waiting(self) -> list[int]:
        """Sorted indices of waiting groups."""
        if not self.counts[State.WAITING]:
            return []
        return [index for index in self.untaken if self.entries[index].state is State.WAITING]

    def is_dead(self, versions: VersionRuns) -> bool:
        """Whether some token was made by weights that a restored learner has left behind (Law 4)."""
        return any(
            bool(((versions.incarnations < incarnation) & (versions.steps > step)).any())
            for incarnation, step in self.restores
        )

    def _late(self) -> Effect:
        self.num_late += 1
        return Effect.LATE

    def _move(self, entry: Entry, state: State) -> None:
        """Change the state and every count that follows from it."""
        if entry.state is State.READY:
            del self.ready[entry.index]
        elif entry.state is State.IN_FLIGHT:
            self._count_in_flight(entry, -1)
        if entry.state in UNTAKEN and state not in UNTAKEN:
            del self.untaken[bisect_left(self.untaken, entry.index)]
            if entry.fresh:
                del self.fresh[bisect_left(self.fresh, entry.index)]
            self.queue_tokens -= entry.num_tokens
        elif entry.state not in UNTAKEN and state in UNTAKEN:
            self.queue_tokens += entry.num_tokens
        self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state, entry.replica = state, ""

    def _count_in_flight(self, entry: Entry, by: int) -> None:
        self.in_flight[entry.replica] += by
        if entry.fresh:
            self.fresh_in_flight[entry.replica] += by

    def _needs_no_replica(self, entry: Entry) -> None:
        self._count_in_flight(entry, -1)
        entry.replica = ""
        self._count_in_flight(entry, 1)

    def _wait_again(self, entry: Entry) -> None:
        self.num_requeued += entry.state is not State.WAITING
        self._move(entry, State.WAITING)
        entry.attempt = 0

    def _end(self, entry: Entry, outcome: str, reason: str) -> None:
        self._move(entry, State.ENDED)
        entry.outcome, entry.reason = outcome, reason
        self.outcomes[outcome] += 1
        if outcome != "trained":
            self.reasons[outcome, reason] += 1

    def _forget(self, index: int) -> None:
        """Drop the entry of `index` if it ended; a long-lived straggler stays until the ledger is dropped."""
        entry = self.entries.get(index)
        if entry is not None and entry.state is State.ENDED:
            del self.entries[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Book) and vars(self) == vars(other)
