"""Laws 1, 2 and 7 under random schedules: the replay room is driven by a model that knows nothing of its inside."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forge_async.core.records import Group, PromptId
from forge_async.replay.admission import Prompts
from forge_async.replay.bound import Bound
from forge_async.replay.entry import State
from forge_async.replay.journal import Journal
from forge_async.replay.ledger import Ledger
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import dials, make_group

EPOCH = 7
GUESS = 10
QUICK = settings(max_examples=60, stateful_step_count=20, suppress_health_check=[HealthCheck.too_slow], database=None)


@dataclass(frozen=True)
class Try:
    """One attempt at a group, as a rollout worker holds it."""

    index: int
    prompt_id: PromptId
    attempt: int
    replica: str
    step: int
    incarnation: int


class ReplayMachine(RuleBasedStateMachine):
    """The world around the replay room."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "events.jsonl"
        self.tries: list[Try] = []
        self.taken: list[list[PromptId]] = []
        self.num_trained = self.published = self.incarnation = self.num_names = 0
        self.replicas: dict[str, int] = {}
        self.dead_after: list[tuple[int, int]] = []
        self.bounds: dict[int, list[int]] = {}
        """The bounds that each group was started under, in order; 0 for a fresh one."""
        self.fresh: dict[int, bool] = {}
        """Whether a group goes through the fresh lane."""
        self.last: Group | None = None
        self.disturbed = False

    @initialize(dials=dials(on_stale=("wait", "drop")), num_replicas=st.integers(1, 3))
    def begin(self, dials, num_replicas: int) -> None:
        self.settings, self.groups_per_step = dials
        self.common: dict[str, Any] = {
            "settings": self.settings,
            "groups_per_step": self.groups_per_step,
            "prompts": Prompts(source="s", epoch_size=EPOCH),
            "tokens_guess": GUESS,
        }
        self.journal = Journal.open(self.path, fsync="never")
        self.state = ReplayState(**self.common, journal=self.journal)
        for _ in range(num_replicas):
            self.join()

    # Policies.

    @precondition(lambda self: len(self.replicas) < 3)
    @rule()
    def join(self) -> None:
        name = f"r{self.num_names}"
        self.num_names += 1
        self.replicas[name] = self.published
        self.state.add_replica(name, self.published)

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(which=st.integers(0, 9))
    def die(self, which: int) -> None:
        name = sorted(self.replicas)[which % len(self.replicas)]
        del self.replicas[name]
        self.state.remove_replica(name)

    @rule(which=st.integers(0, 9), num=st.integers(1, 20))
    def admit(self, which: int, num: int) -> None:
        name = sorted(self.replicas)[which % len(self.replicas)]
        given = self.state.admit(name, num)
        assert len(given) <= num
        entries = self.state.ledger.entries
        assert all(entries[one.index].num_failed_tries < self.settings.max_attempts for one in given)
        for one in given:
            assert one.min_step == self.replicas[name]
            assert one.prompt_id == PromptId(source="s", epoch=one.index // EPOCH, index=one.index % EPOCH)
            self.fresh[one.index] = one.fresh
            self.bounds.setdefault(one.index, []).append(0 if one.fresh else self.state.bound.max_staleness)
            self.tries.append(Try(one.index, one.prompt_id, one.attempt, name, one.min_step, self.incarnation))

    @rule(which=st.integers(0, 9), by=st.integers(1, 4))
    def pull(self, which: int, by: int) -> None:
        name = sorted(self.replicas)[which % len(self.replicas)]
        self.replicas[name] = min(self.replicas[name] + by, self.published)
        self.state.pulled(name, self.replicas[name])

    # Rollouts: a try may come back long after its replica died or the run was restored.

    @precondition(lambda self: self.tries)
    @rule(which=st.integers(0, 99), size=st.sampled_from((1, 2, 5, 60)), fresh=st.booleans())
    def finish(self, which: int, size: int, fresh: bool) -> None:
        one = self.tries.pop(which % len(self.tries))
        newest = max(one.step, self.replicas.get(one.replica, 0)) if fresh else one.step
        self.last = make_group(
            one.index, one.prompt_id, [[one.step] * size, [newest]], incarnation=one.incarnation, prompt_tokens=2
        )
        entry = self.state.ledger.entries.get(one.index)
        awaited = entry is not None and entry.state in (State.WAITING, State.IN_FLIGHT)
        dead = any(one.incarnation < inc and newest > step for inc, step in self.dead_after)
        assert self.state.put([self.last]) == int(awaited and not dead)

    @precondition(lambda self: any(one.step for one in self.tries))
    @rule()
    def finish_with_older_weights_than_was_said(self) -> None:
        """A replica that reports a pull before it has swapped: the one fault that makes groups too old."""
        self.disturbed = True
        self.tries.sort(key=lambda one: one.step)
        self.tries[-1] = dataclasses.replace(self.tries[-1], step=0)
        self.finish(len(self.tries) - 1, 1, False)

    @precondition(lambda self: self.tries)
    @rule(which=st.integers(0, 99))
    def tokens_are_all_made(self, which: int) -> None:
        one = self.tries[which % len(self.tries)]
        awaited, in_flight = self._awaited(one), self.state.ledger.counts[State.IN_FLIGHT]
        self.state.generated([(one.index, one.attempt)])
        if awaited and one.replica in self.replicas and len(self.replicas) > 1:
            del self.replicas[one.replica]
            self.state.remove_replica(one.replica)
            assert self._awaited(one), "only its rewards are missing: it needs no replica"
            assert self.state.ledger.counts[State.IN_FLIGHT] <= in_flight

    @precondition(lambda self: self.last is not None)
    @rule()
    def finish_again(self) -> None:
        assert self.last is not None
        entry = self.state.ledger.entries.get(self.last.index)
        assume(entry is not None and entry.state in (State.READY, State.TAKEN, State.ENDED))
        assert self.state.put([self.last]) == 0

    @precondition(lambda self: self.tries)
    @rule(which=st.integers(0, 99), outcome=st.sampled_from(("filtered", "failed", "cancelled")))
    def end(self, which: int, outcome: str) -> None:
        one = self.tries.pop(which % len(self.tries))
        entry = self.state.ledger.entries.get(one.index)
        current = entry is not None and entry.attempt == one.attempt and entry.state is State.IN_FLIGHT
        assert self.state.end(one.index, outcome, "why", attempt=one.attempt) == current

    @precondition(lambda self: self.tries)
    @rule(which=st.integers(0, 99))
    def give_a_try_up(self, which: int) -> None:
        one = self.tries.pop(which % len(self.tries))
        entry = self.state.ledger.entries.get(one.index)
        current = entry is not None and entry.attempt == one.attempt and entry.state is State.IN_FLIGHT
        last = entry is None or entry.num_failed_tries + 1 >= self.settings.max_attempts
        assert self.state.retry(one.index, "why", attempt=one.attempt) == (current and not last)

    # Learner.

    @rule()
    def learner_asks(self) -> None:
        self.take()

    def take(self) -> bool:
        step = len(self.taken)
        batch = self.state.take(step)
        if batch is None:
            return False
        indices = [group.index for group in batch]
        assert len(batch) == self.groups_per_step and indices == sorted(set(indices))
        self.check_ages(batch, step)
        if not self.disturbed:
            assert self.state.num_stale == 0, "the admission rule alone must keep the bound"
        assert self.state.take(step) is batch
        self.taken.append([group.prompt_id for group in batch])
        return True

    def check_ages(self, batch: list[Group], step: int) -> None:
        """Law 2, for each sample: its group's own bound; a group whose start was undone may have an earlier one."""
        assert sum(self.fresh[group.index] for group in batch) == round(
            self.settings.fresh_fraction * self.groups_per_step
        )
        for group in batch:
            age, bounds = (step - group.samples.oldest_steps()).max(), self.bounds[group.index]
            assert age <= (max(bounds) if self.disturbed else bounds[-1]), f"Law 2: {group.index} is {age} steps old"
            assert age <= (self.settings.highest_staleness or 0)

    @precondition(lambda self: self.settings.max_staleness == "auto")
    @rule(choice=st.integers(0, 9))
    def move_bound(self, choice: int) -> None:
        """As the controller of `auto` may, between any two events, to anything legal but 0 with a fresh lane."""
        num = self.state.bound.groups_per_step
        every, width = self.settings.publish_every, self.settings.window
        legal = [age for age in range(every - 1, self.settings.max_staleness_cap + 1)
                 if width <= (age - every + 1) * num + 1 and (age or not self.settings.fresh_fraction)]  # fmt: skip
        self.state.set_max_staleness(legal[choice % len(legal)])

    @precondition(lambda self: self.num_trained < len(self.taken))
    @rule()
    def train(self) -> None:
        self.state.trained(self.num_trained)
        self.state.trained(self.num_trained)
        self.num_trained += 1

    @rule()
    def publish(self) -> None:
        every = self.settings.publish_every
        self.published = max(self.published, self.num_trained // every * every)
        self.state.published(self.published)

    # A stretch of ordinary work, so that schedules get far; the `straggle` oldest tries are held back.

    @rule(seed=st.integers(0, 2**32), num=st.integers(30, 200), straggle=st.integers(0, 2))
    def work(self, seed: int, num: int, straggle: int) -> None:
        random = Random(seed)
        for _ in range(num):
            which = random.randrange(100)
            kinds = ("admit", "finish", "end", "give up", "pull", "take", "train", "publish", "bound")
            match random.choices(kinds, (3, 8, 1, 1, 2, 2, 2, 2, 1))[0]:
                case "admit":
                    self.admit(which, random.randint(1, 9))
                case "finish" if len(self.tries) > straggle:
                    self.tries.sort(key=lambda one: one.index)
                    which = random.randrange(straggle, len(self.tries))
                    self.finish(which, random.choice((1, 2, 5, 60)), random.random() < 0.5)
                case "end" if len(self.tries) > straggle:
                    self.tries.sort(key=lambda one: one.index)
                    self.end(
                        random.randrange(straggle, len(self.tries)), random.choice(("filtered", "failed", "cancelled"))
                    )
                case "give up" if len(self.tries) > straggle:
                    self.give_a_try_up(random.randrange(straggle, len(self.tries)))
                case "pull":
                    self.pull(which, random.randint(1, 4))
                case "take":
                    self.take()
                case "train" if self.num_trained < len(self.taken):
                    self.train()
                case "publish":
                    self.publish()
                case "bound" if self.settings.max_staleness == "auto":
                    self.move_bound(which)
            self.every_group_is_in_one_place()

    # Faults.

    @rule(
        back=st.integers(0, 2),
        learner_too=st.booleans(),
        closed=st.booleans(),
        torn=st.sampled_from((b"", b'{"sch')),
        no_more_fresh=st.booleans(),
    )
    def crash_and_resume(self, back: int, learner_too: bool, closed: bool, torn: bytes, no_more_fresh: bool) -> None:
        step = max(0, self.num_trained - back) if learner_too else self.num_trained
        if closed:
            self.state.close("stopped")
            assert self.state.admit(next(iter(self.replicas)), 9) == []
            self.state.ledger.check(deep=True)
        self.journal.close()
        assert Ledger.replay(Journal.read(self.path), GUESS) == self.state.ledger
        with self.path.open("ab") as file:
            file.write(torn)
        self.incarnation += learner_too
        if learner_too:
            self.dead_after.append((self.incarnation, step))
        if no_more_fresh:
            self.settings = self.common["settings"] = dataclasses.replace(self.settings, fresh_fraction=0.0)
            self.fresh = dict.fromkeys(self.fresh, False)
        self.journal = Journal.open(self.path, fsync="never")
        self.state = ReplayState.resume(
            list(Journal.read(self.path)), step=step, incarnation=self.incarnation, **self.common, journal=self.journal
        )
        del self.taken[step:]
        self.num_trained = self.published = step
        self.replicas = dict.fromkeys(self.replicas, step)
        for name in self.replicas:
            self.state.add_replica(name, step)
        self.last, self.disturbed = None, True
        for bounds in self.bounds.values():
            bounds.append(self.state.bound.max_staleness)

    # Laws.

    @invariant()
    def every_group_is_in_one_place(self) -> None:
        if not hasattr(self, "state"):
            return
        ledger = self.state.ledger
        ledger.check(deep=True)
        assert ledger.num_admitted == sum(ledger.counts.values())
        assert len(self.state.buffer) == len(ledger.ready)
        assert self.state.buffer.num_tokens == sum(ledger.entries[index].num_tokens for index in ledger.ready)

    @invariant()
    def no_prompt_is_trained_twice(self) -> None:
        trained = [prompt_id for batch in self.taken for prompt_id in batch]
        assert len(trained) == len(set(trained))

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.everything_that_finishes_lets_the_learner_go_on()
            self.the_journal_tells_the_same_story()
            self.journal.close()
        self.folder.cleanup()

    def everything_that_finishes_lets_the_learner_go_on(self) -> None:
        self.tries = [one for one in self.tries if self._awaited(one)]
        for _ in range(2 * self.settings.publish_every + 1):
            for _ in range(8):
                while self.num_trained < len(self.taken):
                    self.train()
                self.publish()
                for which in range(len(self.replicas)):
                    self.pull(which, 99)
                for which in range(len(self.replicas)):
                    self.admit(which, 99)
                while self.tries:
                    self.finish(0, 1, False)
                if self.take():
                    break
            else:
                raise AssertionError(f"No liveness: {self.state.why_no_batch()}; {self.state.ledger.counts}")

    def the_journal_tells_the_same_story(self) -> None:
        assert Ledger.replay(Journal.read(self.path), GUESS) == self.state.ledger

    def _awaited(self, one: Try) -> bool:
        entry = self.state.ledger.entries.get(one.index)
        return entry is not None and entry.attempt == one.attempt and entry.state is State.IN_FLIGHT


def test_laws_hold_under_random_schedules() -> None:
    run_state_machine_as_test(ReplayMachine, settings=QUICK)


def naive_select(untaken, ready, *, window, groups_per_step, order):
    """The tempting rule: look at the first W groups that are untaken now, wherever their indices are."""
    left, picked = list(untaken), []
    while len(picked) < groups_per_step:
        choice = next((index for index in left[:window] if index in ready), None)
        if choice is None:
            return None
        left.remove(choice)
        picked.append(choice)
    return tuple(sorted(picked))


def drive(seeds: int = 20, num: int = 2, **dials: Any) -> None:
    """Fixed schedules in which the oldest group is held back for a while: enough to tell a right rule from a wrong."""
    for seed in range(seeds):
        machine = ReplayMachine()
        machine.begin((AsyncSettings(**{"max_staleness": 2, "window": 4, "max_attempts": 100} | dials), num), 2)
        for stretch in range(4):
            machine.work(100 * seed + stretch, 150 if seed % 2 else 40, (stretch + 1) % 2)
        machine.teardown()


def test_fixed_schedules_keep_the_bound() -> None:
    drive()


FRESH: dict[str, Any] = {"num": 4, "fresh_fraction": 0.5, "window": 2}
AUTO: dict[str, Any] = {"max_staleness": "auto", "max_staleness_cap": 4, "window": 2}


@pytest.mark.parametrize("dials", [FRESH, AUTO, FRESH | AUTO], ids=["fresh", "auto", "both"])
def test_fixed_schedules_keep_each_groups_own_bound(dials) -> None:
    drive(seeds=10, **dials)


def test_a_fresh_lane_with_room_for_a_second_batch_breaks_its_bound(monkeypatch) -> None:
    deep = property(lambda self: (self.max_staleness + 1 + (self.max_staleness == 0)) * self.groups_per_step)
    monkeypatch.setattr(Bound, "depth", deep)
    with pytest.raises(AssertionError, match="admission rule alone"):
        drive(**FRESH | {"window": 1})


def test_groups_started_under_a_fallen_bound_with_the_depth_of_the_old_one_break_theirs(monkeypatch) -> None:
    monkeypatch.setattr(Bound, "depth", property(lambda self: (4 + 1) * self.groups_per_step - self.window + 1))
    with pytest.raises(AssertionError, match="admission rule alone"):
        drive(**AUTO)


def test_a_window_over_the_first_untaken_groups_breaks_the_bound(monkeypatch) -> None:
    monkeypatch.setattr("forge_async.replay.state.select", naive_select)
    with pytest.raises(AssertionError, match="admission rule alone"):
        drive()


def test_depth_without_the_window_term_breaks_the_bound(monkeypatch) -> None:
    monkeypatch.setattr(Bound, "depth", property(lambda self: (self.max_staleness + 1) * self.groups_per_step))
    with pytest.raises(AssertionError, match="admission rule alone"):
        drive()


def test_counting_only_trained_steps_as_unpulled_breaks_the_bound(monkeypatch) -> None:
    monkeypatch.setattr(Ledger, "steps_unpulled", lambda self, step: self.num_trained - step)
    with pytest.raises(AssertionError, match="admission rule alone"):
        drive()


def test_one_group_less_of_depth_stops_the_learner_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(Bound, "depth", property(lambda self: self.groups_per_step - 1))
    with pytest.raises(AssertionError, match="No liveness"):
        drive(seeds=1)
