"""Replicas and prompts of different speed, on a simulated clock: who is given what, and what is trained on."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

import pytest

from forge_async.core.records import Group
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.admitter import Admitter
from forge_async.replay.bound import UNLIMITED
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import make_group


@dataclass
class Engine:
    """A replica that makes `width` groups at a time; the others queue."""

    slots: float
    """Groups at a time."""
    pull_s: float
    queue: deque[Admission] = field(default_factory=deque)
    busy: int = 0
    busy_s: float = 0.0
    num_made: int = 0


@dataclass
class World:
    """Replay, engines and a learner on one simulated clock."""

    state: ReplayState
    engines: dict[str, Engine]
    seconds_of: Callable[[str, Admission], float]
    """How long an engine takes for a group."""
    train_s: float
    groups_per_step: int
    now: float = 0.0
    batches: list[list[Group]] = field(default_factory=list)
    asleep: set[str] = field(default_factory=set)
    """Replicas whose loops do not ask."""

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.training = False
        for name in self.engines:
            self.state.add_replica(name, 0)

    def run(self, num_steps: int) -> None:
        """Go on until so many more steps are done."""
        last = len(self.batches) + num_steps
        self.settle()
        while len(self.batches) < last or self.training:
            assert self.events, self.state.why_no_batch()
            self.now, _, happen = heapq.heappop(self.events)
            happen()
            self.settle()

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, self.order(), happen))

    def order(self) -> int:
        self.num_events = getattr(self, "num_events", 0) + 1
        return self.num_events

    def settle(self) -> None:
        """What the loops do at once: ask for groups in turn, fill engines, take a batch."""
        share = -(-self.groups_per_step // len(self.engines))
        while sum(self.ask(name, share) for name in self.engines if name not in self.asleep):
            pass
        for name in self.engines:
            self.fill(name)
        if not self.training and (batch := self.state.take(len(self.batches))) is not None:
            self.training = True
            self.batches.append(batch)
            self.after(self.train_s, self.trained)

    def ask(self, name: str, share: int) -> bool:
        given = self.state.admit(name, share)
        queue, fresh = self.engines[name].queue, [one for one in given if one.fresh]
        queue.extend(one for one in given if not one.fresh)
        queue.extendleft(reversed(fresh))  # the step in progress waits for them
        return bool(given)

    def fill(self, name: str) -> None:
        engine = self.engines[name]
        while engine.queue and engine.busy < engine.slots:
            one = engine.queue.popleft()
            seconds = self.seconds_of(name, one)
            engine.busy += 1
            engine.busy_s += seconds
            self.after(seconds, lambda one=one: self.made(name, one))

    def made(self, name: str, one: Admission) -> None:
        self.engines[name].busy -= 1
        self.engines[name].num_made += 1
        self.state.put([make_group(one.index, one.prompt_id, [[one.min_step]])])

    def trained(self) -> None:
        step = len(self.batches)
        self.training = False
        self.state.trained(step - 1)
        self.state.published(step)
        for name, engine in self.engines.items():
            self.after(engine.pull_s, lambda name=name: self.state.pulled(name, step))


def world(
    seconds: Mapping[str, float], *, seed: int = 0, num: int = 8, train_s: float = 1.0, pulls=(), **dials
) -> World:
    """Engines that make one group at a time in about so many seconds each."""
    random = Random(seed)
    return World(
        state=ReplayState(
            settings=AsyncSettings(**dials),
            groups_per_step=num,
            prompts=Prompts(source="s", epoch_size=10**6),
            tokens_guess=2,
        ),
        engines={name: Engine(slots=1, pull_s=dict(pulls).get(name, random.uniform(0.1, 0.3))) for name in seconds},
        seconds_of=lambda name, one: seconds[name] * random.uniform(0.5, 1.5),
        train_s=train_s,
        groups_per_step=num,
    )


def measured(one: World, num_steps: int) -> tuple[dict[str, int], dict[str, float], float]:
    """Groups made and busy fraction of each engine, and seconds a step, over the next steps."""
    before = {name: (engine.num_made, engine.busy_s) for name, engine in one.engines.items()}
    begun = one.now
    one.run(num_steps)
    made = {name: engine.num_made - before[name][0] for name, engine in one.engines.items()}
    busy = {name: (engine.busy_s - before[name][1]) / (one.now - begun) for name, engine in one.engines.items()}
    return made, busy, (one.now - begun) / num_steps


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("first_to_pull", ["slow", "fast"])
def test_work_is_shared_by_speed_and_the_fast_replica_is_not_idle(seed: int, first_to_pull: str) -> None:
    one = world({"fast": 1.0, "slow": 4.0}, seed=seed, pulls={first_to_pull: 0.01}, max_staleness=2)
    one.run(20)
    made, busy, _ = measured(one, 60)
    assert 3.4 <= made["fast"] / made["slow"] <= 4.6
    assert busy["fast"] > 0.95 and busy["slow"] > 0.9


def test_without_shares_a_slow_replica_holds_the_fast_one_up(monkeypatch) -> None:
    monkeypatch.setattr(Admitter, "fair_share", lambda self, lane, replica: UNLIMITED)
    one = world({"fast": 1.0, "slow": 4.0}, max_staleness=2)
    one.run(20)
    assert measured(one, 60)[1]["fast"] < 0.8


def test_replicas_that_more_work_makes_no_slower_keep_the_learner_supplied_however_they_share() -> None:
    """Nothing pulls such shares to the middle but the part that is given out evenly; nothing is lost either."""
    one = world({"a": 4.0, "b": 4.0}, max_staleness=2)
    for engine in one.engines.values():
        engine.slots = 1000
    one.run(30)
    made, _, step_s = measured(one, 100)
    assert 1 / 6 < made["a"] / made["b"] < 6 and step_s < 2.5, "the chain of 4 s + 1 s + pull over 3 batches"


def test_a_replica_whose_loop_sleeps_takes_nothing_from_the_other_for_long() -> None:
    one = world({"a": 1.0, "b": 1.0}, max_staleness=2)
    one.run(10)
    one.asleep.add("b")
    one.run(20)
    _, busy, step_s = measured(one, 20)
    assert busy["a"] > 0.95 and step_s < 8.5
    one.asleep.clear()
    one.run(30)
    made, _, step_s = measured(one, 30)
    assert 0.7 < made["a"] / made["b"] < 1.4 and step_s < 4.5


def test_a_successor_counts_as_fast_as_the_others_until_it_is_measured() -> None:
    one = world({"a": 1.0, "b": 1.0}, max_staleness=2)
    one.run(10)
    one.state.remove_replica("b")
    one.engines["b"].queue.clear()
    one.state.add_replica("b", one.state.ledger.published)
    made, *_ = measured(one, 4)
    assert made["b"] > 0.6 * made["a"]


@pytest.mark.parametrize("window", [1, 9])
def test_prompts_of_two_latencies_are_trained_in_the_proportion_in_which_they_were_drawn(window: int) -> None:
    """One of four prompts takes six steps to answer, the others one; S = 3."""
    one = world({"a": 0.0, "b": 0.0}, max_staleness=3, window=window)
    one.seconds_of = lambda name, admission: 6.0 if is_long(admission) else 1.0
    for engine in one.engines.values():
        engine.slots = 1000
    one.run(20)
    first = len(one.batches)
    one.run(100)
    trained = Counter(is_long(group) for batch in one.batches[first:] for group in batch)
    assert abs(trained[True] / trained.total() - 0.25) < 0.05 * 0.25
    ledger = one.state.ledger
    assert ledger.outcomes.total() == ledger.outcomes["trained"] and one.state.num_stale == ledger.num_requeued == 0


def is_long(what: Admission | Group) -> bool:
    return what.prompt_id.index % 4 == 0


def test_fresh_groups_cost_their_own_way_round_and_not_the_whole_batchs() -> None:
    """Eight groups of 1 s each: a step takes 8 s in engine time, and 1 s of training and a pull more where it waits."""
    seconds = {}
    for name, dials in {
        "synchronous": {"max_staleness": 0},
        "fresh": {"max_staleness": 2, "fresh_fraction": 0.25},
        "asynchronous": {"max_staleness": 2},
    }.items():
        one = world({"a": 1.0}, **dials)
        one.run(10)
        seconds[name] = measured(one, 40)[2]
    assert seconds["synchronous"] > 8.8 and seconds["fresh"] < 8.4 and seconds["asynchronous"] < 8.4


def test_fresh_groups_cost_as_much_as_synchrony_where_a_group_takes_longer_than_a_step() -> None:
    seconds = {}
    for name, dials in {"fresh": {"fresh_fraction": 0.25}, "asynchronous": {}}.items():
        one = world({"a": 4.0}, max_staleness=2, **dials)
        one.engines["a"].slots = 1000
        one.run(10)
        seconds[name] = measured(one, 40)[2]
    assert seconds["fresh"] > 5.0 and seconds["asynchronous"] < 2.5
