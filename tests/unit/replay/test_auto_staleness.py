"""The controller of `async.max_staleness=auto` and its way into the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError
from forge_async.core.records import Group
from forge_async.replay.admission import Prompts
from forge_async.replay.auto_staleness import AutoStaleness
from forge_async.replay.journal import Journal
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import make_group


def steps(auto: AutoStaleness, num: int, *, lag_s: float, pull_s: float = 0.0, train_s: float = 1.0) -> list[int]:
    """S after each of `num` steps in which groups and syncs take so long, and S + 1 batches are under way together."""
    seen = []
    for _ in range(num):
        for _ in range(16):
            auto.observe_group(0.75 * lag_s, 0.25 * lag_s)
        auto.observe_sync(0.0, pull_s)
        step_s = max(train_s, (lag_s + pull_s) / (auto.max_staleness + 1))
        auto.observe_step(step_s, step_s - train_s)
        seen.append(auto.max_staleness)
    return seen


def controller(begin: int = 2, least: int = 1, cap: int = 8) -> AutoStaleness:
    return AutoStaleness(begin=begin, least=least, cap=cap)


def test_a_delay_of_pulls_raises_the_bound_and_its_end_lowers_it() -> None:
    auto = controller()
    assert set(steps(auto, 10, lag_s=1.5)) == {2}
    during = steps(auto, 40, lag_s=1.5, pull_s=2.0)
    assert during[-1] in (3, 4), "with four batches under way, 3.5 s keep up with 1 s a step"
    after = steps(auto, 30, lag_s=1.5)
    assert after[0] == during[-1] and after[-1] == 2 and after == sorted(after, reverse=True)


def test_a_move_says_what_was_measured() -> None:
    auto = controller(cap=3)
    auto.observe_group(4.0, 0.5)
    auto.observe_sync(0.25, 0.25)
    assert auto.observe_step(1.0, 0.5) is None, "once may be chance"
    move = auto.observe_step(1.0, 0.5)
    assert move is not None and (move.before, move.max_staleness) == (2, 3)
    assert move.why == (
        "max_staleness moves from 2 to 3: rollout, scoring, publish and pull take 5 s (95th percentile), 5.00 steps, "
        "more than async.max_staleness_cap=3 allows."
    )


def test_a_learner_that_never_waits_needs_no_more_age() -> None:
    auto = controller()
    for _ in range(50):
        auto.observe_group(9.0, 1.0)
        auto.observe_sync(0.1, 0.1)
        assert auto.observe_step(1.0, 0.0) is None


def test_where_generation_is_the_slowest_stage_the_bound_does_not_chase_it() -> None:
    """Engines at their limit: the more groups are under way, the longer each takes, and steps stay as they are."""
    auto, seen, told = controller(), [], []
    for step in range(200):
        auto.observe_group(2.0 * (auto.max_staleness + 1), 0.1)
        auto.observe_sync(0.1, 0.2 if step < 150 else 4.0)
        if move := auto.observe_step(2.0, 1.0):
            told.append(move.why)
        seen.append(auto.max_staleness)
    assert sum(each > 2 for each in seen[:150]) <= 10, "one rise, taken back"
    assert seen[149] == 2
    assert "steps took 2 s before the rise and 2 s after it" in told[1]
    assert max(seen[150:]) > 2, "a version that travels much longer is another matter, and tried anew"


@pytest.mark.parametrize("boundary", [2.0, 3.0, 4.0])
def test_a_lag_that_wavers_about_a_boundary_moves_the_bound_once(boundary: float) -> None:
    random, auto, seen = Random(0), controller(), []
    for _ in range(200):
        seen += steps(auto, 1, lag_s=boundary + random.uniform(-0.1, 0.1), train_s=random.uniform(0.99, 1.01))
    assert sum(a != b for a, b in zip(seen, seen[1:], strict=False)) <= 1
    assert seen[-1] in (2, 3, 4)


def test_a_single_slow_step_or_group_moves_nothing() -> None:
    auto = controller()
    steps(auto, 10, lag_s=1.5)
    auto.observe_group(100.0, 0.0)
    assert set(steps(auto, 1, lag_s=1.5, train_s=20.0) + steps(auto, 10, lag_s=1.5)) == {2}


def test_nothing_moves_before_everything_is_measured() -> None:
    auto = controller()
    auto.observe_group(50.0, 0.0)
    assert auto.observe_step(1.0, 0.5) is None and auto.lag_steps() is None


def test_a_beginning_outside_its_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="begins at 1"):
        controller(begin=1, least=2)


@settings(max_examples=60)
@given(
    lags=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50), st.floats(0.01, 10)), max_size=60),
    least=st.integers(1, 3),
    extra=st.integers(0, 5),
)
def test_the_bound_never_leaves_its_range(lags: Sequence[tuple[float, float, float]], least: int, extra: int) -> None:
    auto = controller(begin=least, least=least, cap=least + extra)
    for lag_s, pull_s, step_s in lags:
        assert least <= steps(auto, 1, lag_s=lag_s, pull_s=pull_s, train_s=step_s)[0] <= least + extra


# The bound in the ledger.


def replay(num: int = 2, journal: Journal | None = None, **dials) -> ReplayState:
    state = ReplayState(
        settings=AsyncSettings(max_staleness="auto", **dials),
        groups_per_step=num,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        journal=journal,
    )
    state.add_replica("r", 0)
    return state


def ready(state: ReplayState) -> list[int]:
    given = state.admit("r", 100)
    state.put([make_group(one.index, one.prompt_id, [[one.min_step]]) for one in given])
    return [one.index for one in given]


def step_of(state: ReplayState) -> list[Group]:
    step = state.ledger.next_step
    batch = state.take(step)
    assert batch is not None
    state.trained(step)
    state.published(step + 1)
    state.pulled("r", step + 1)
    return batch


def test_groups_keep_the_bound_they_were_started_under_when_it_falls() -> None:
    state = replay()
    state.set_max_staleness(3)
    assert len(ready(state)) == 8
    state.set_max_staleness(1)
    assert ready(state) == [] and state.state()["staleness/bound"] == 1 and state.state()["queue/capacity"] == 4
    for step in range(4):
        assert [group.index for group in step_of(state)] == [2 * step, 2 * step + 1]
        assert ready(state) == ([] if step < 2 else [2 * step + 4, 2 * step + 5])
    assert state.state()["staleness/max"] == 3 and state.num_stale == 0, "older than the new bound, not than their own"
    step_of(state)
    assert state.state()["staleness/max"] <= 1


def test_a_raised_bound_gives_room_at_once() -> None:
    state = replay()
    assert len(ready(state)) == 6
    state.set_max_staleness(4)
    assert len(ready(state)) == 4


def test_a_bound_above_the_cap_or_without_room_is_refused_and_changes_nothing() -> None:
    state = replay(max_staleness_cap=4, window=3)
    with pytest.raises(ConfigError, match="above the greatest that this run allows, 4"):
        state.set_max_staleness(5)
    with pytest.raises(ConfigError, match="window=3"):
        state.set_max_staleness(0)
    assert state.bound.max_staleness == state.ledger.max_staleness == 2


def test_a_resumed_run_goes_on_with_the_bound_that_was_in_force(tmp_path) -> None:
    journal = Journal.open(tmp_path / "events.jsonl")
    state = replay(journal=journal)
    state.set_max_staleness(5)
    ready(state)
    step_of(state)
    state.set_max_staleness(7)
    for cap, expected in ((8, 5), (3, 3)):
        resumed = ReplayState.resume(
            list(Journal.read(journal.path)),
            step=1,
            incarnation=1,
            settings=AsyncSettings(max_staleness="auto", max_staleness_cap=cap),
            groups_per_step=2,
            prompts=Prompts(source="s", epoch_size=100),
            tokens_guess=10,
            journal=journal,
        )
        assert resumed.bound.max_staleness == resumed.ledger.max_staleness == expected
