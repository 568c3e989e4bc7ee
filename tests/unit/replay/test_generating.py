"""A replica is given what its engine can use soon; what would only queue there stays free for the others."""

from __future__ import annotations

import asyncio

import pytest

from forge_async.backends.simulated.times import EngineTimes, LearnerTimes, LogNormalLengths
from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.backends.simulated.world import SimulatedPlan, SimulatedWorld
from forge_async.pipeline.observers import Deaf
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.bound import UNLIMITED
from forge_async.replay.generating import Generating, groups_at_once
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from forge_async.replay.waiting import WaitingReplay
from tests.strategies import make_group


def replay(at_once: int | None = 2, num: int = 8, **dials) -> ReplayState:
    state = ReplayState(
        settings=AsyncSettings(**dials),
        groups_per_step=num,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        groups_at_once=at_once,
    )
    for name in ("a", "b"):
        state.add_replica(name, 0)
    return state


def indices(given: list[Admission]) -> list[int]:
    return [one.index for one in given]


def tries(given: list[Admission]) -> list[tuple[int, int]]:
    return [(one.index, one.attempt) for one in given]


@pytest.mark.parametrize(
    ("num_replicas", "max_sequences", "group_size", "expected"),
    [(1, 512, 8, None), (2, 512, 8, 65), (2, 4, 4, 2), (2, 3, 8, 2), (2, 9, 8, 3)],
)
def test_an_engine_gets_what_it_runs_at_once_and_one_group_ahead(num_replicas, max_sequences, group_size, expected):
    assert groups_at_once(num_replicas, max_sequences, group_size) == expected


def test_a_replica_gets_no_more_than_its_engine_can_use_and_the_rest_goes_to_whoever_is_done():
    state = replay()
    mine, others = state.admit("a", 8), state.admit("b", 8)
    assert (indices(mine), indices(others)) == ([0, 1], [2, 3])
    assert state.admit("a", 8) == []
    assert state.why_no_admission("a") == "a has 2 groups in flight and generates as many as its engine runs"
    state.generated(tries(others))
    assert indices(state.admit("b", 8)) == [4, 5], "scoring takes none of the engine's room"
    assert state.admit("a", 8) == state.admit("b", 8) == []


def test_room_comes_back_once_whether_a_group_is_generated_put_or_ended():
    state = replay()
    first, second = state.admit("a", 8)
    state.generated(tries([first]))
    state.generated(tries([first]))
    (third,) = state.admit("a", 8)
    state.put([make_group(first.index, first.prompt_id, [[0]])])
    assert state.admit("a", 8) == [], "its room was given away when it was generated"
    state.put([make_group(second.index, second.prompt_id, [[0]])])
    (fourth,) = state.admit("a", 8)
    state.end(third.index, "failed", "a test wants it", third.attempt)
    state.end(fourth.index, "failed", "a test wants it", fourth.attempt)
    assert len(state.admit("a", 8)) == 2


def test_a_try_that_is_no_longer_awaited_frees_nothing():
    state = replay()
    first, second = state.admit("a", 8)
    state.retry(first.index, "a test wants it", first.attempt)
    (again,) = state.admit("a", 8)
    assert again.index == first.index
    before = state.num_changes
    state.generated([*tries([first]), (99, 1)])
    assert state.admit("a", 8) == [] and state.num_changes == before
    state.remove_replica("a")
    state.add_replica("a", 0)
    state.generated(tries([again, second]))
    assert len(state.admit("a", 8)) == 2 and state.admit("a", 8) == []


def test_groups_whose_tokens_are_made_outlive_their_replica():
    state = replay()
    made, lost = state.admit("a", 8)
    state.generated(tries([made]))
    state.remove_replica("a")
    assert state.ledger.waiting() == [lost.index], "only the rewards of the other are awaited"
    assert f"group {made.index} (made by a replica that is gone, being scored)" in state.why_no_batch()
    state.ledger.check(deep=True)
    state.add_replica("a", 0)
    assert [one.index for one in state.admit("a", 8)] == [lost.index, 2]
    assert state.put([make_group(made.index, made.prompt_id, [[0]])]) == 1
    state.ledger.check(deep=True)


def test_a_made_group_that_is_not_scored_after_all_waits_again():
    state = replay()
    made, _ = state.admit("a", 8)
    state.generated(tries([made]))
    state.remove_replica("a")
    assert state.retry(made.index, "reward_timeout", made.attempt)
    assert made.index in state.ledger.waiting()
    state.ledger.check(deep=True)


def test_nothing_is_held_back_at_s_0_nor_for_one_replica_nor_of_fresh_groups():
    assert indices(replay(max_staleness=0).admit("a", 8)) == [0, 2, 4, 6]
    assert len(replay(at_once=None).admit("a", 8)) == 8
    given = replay(fresh_fraction=0.5).admit("a", 8)
    assert [one.fresh for one in given].count(True) == 2, "the fair share of four, beside two others"
    assert [one.fresh for one in given].count(False) == 0, "their room in the engine is taken"


def test_whoever_waits_for_room_is_woken_when_groups_are_generated():
    async def scenario():
        waiting = WaitingReplay(replay())
        mine = await waiting.admit("a", 8)
        more = asyncio.create_task(waiting.admit("a", 8))
        await asyncio.sleep(0)
        assert not more.done()
        await waiting.generated(tries(mine))
        assert len(await asyncio.wait_for(more, 5)) == 2

    asyncio.run(scenario())


def seconds_of_a_run() -> float:
    """Three engines of one slot each, S = 1: a step is as long as the engines take for a batch."""
    plan = SimulatedPlan(
        lengths_of=LogNormalLengths(mean_tokens=40, sigma=1.0),
        dials=AsyncSettings(max_staleness=1),
        num_steps=20,
        groups_per_step=24,
        group_size=1,
        engines=(EngineTimes(full_token_s=0.1, max_sequences=1),) * 3,
        learner=LearnerTimes(step_s=20.0),
    )

    async def scenario():
        await SimulatedWorld(plan, LoopClock(), Deaf()).run()
        return LoopClock().now_s()

    return run_virtually(scenario())


def test_a_batch_is_sooner_done_than_if_it_were_shared_out_at_once(monkeypatch):
    kept_back_s = seconds_of_a_run()
    monkeypatch.setattr(Generating, "room", lambda self, replica: UNLIMITED)
    assert kept_back_s < 0.95 * seconds_of_a_run()
