"""A share of each batch made wholly by the version that trains on it, beside the rest with S."""

from __future__ import annotations

import pytest

from forge_async.core.errors import ConfigError
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.journal import Journal
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import make_group


def replay(num: int = 4, replicas: int = 1, journal: Journal | None = None, **dials) -> ReplayState:
    state = ReplayState(
        settings=AsyncSettings(**{"fresh_fraction": 0.25, "max_staleness": 2} | dials),
        groups_per_step=num,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        journal=journal,
    )
    for which in range(replicas):
        state.add_replica(f"r{which}", 0)
    return state


def put(state: ReplayState, given: list[Admission]) -> None:
    state.put([make_group(one.index, one.prompt_id, [[one.min_step]]) for one in given])


def fresh(given: list[Admission]) -> list[int]:
    return [one.index for one in given if one.fresh]


def train(state: ReplayState, pulling: tuple[str, ...] = ("r0",)) -> list[int]:
    step = state.ledger.next_step
    batch = state.take(step)
    assert batch is not None
    state.trained(step)
    state.published(step + 1)
    for name in pulling:
        state.pulled(name, step + 1)
    return [group.index for group in batch]


def test_each_batch_has_its_fresh_groups_made_by_its_own_version() -> None:
    state = replay()
    given = state.admit("r0", 100)
    assert fresh(given) == [0] and len(given) == 1 + 3 * 3, "one fresh group, and three batches of the other three"
    put(state, given)
    assert train(state) == [0, 1, 2, 3]
    given = state.admit("r0", 100)
    assert fresh(given) == [10] and len(given) == 4 and given[0].min_step == 1
    assert state.take(1) is None, "the others are ready, the fresh one is not"
    assert state.why_no_batch().startswith(
        "step 1 needs 4 groups: 6 are ready, 4 in flight, 0 waiting for a replica; "
        "1 must be fresh, made by version 1, of which 0 are ready; the oldest that is missing is group 10"
    )
    put(state, given)
    assert state.state()["queue/fresh_depth"] == 1 and state.state()["queue/capacity"] == 10
    assert train(state) == [4, 5, 6, 10]


def test_a_step_that_waits_for_a_pull_says_so() -> None:
    state = replay()
    put(state, state.admit("r0", 100))
    train(state, pulling=())
    assert state.admit("r0", 100) == [] and state.take(1) is None
    assert "which no replica has pulled (published: 1)" in state.why_no_batch()


def test_only_a_replica_at_the_newest_version_is_given_fresh_groups() -> None:
    state = replay(num=4, replicas=2, fresh_fraction=0.5)
    put(state, state.admit("r0", 100) + state.admit("r1", 100))
    train(state, pulling=("r1",))
    assert fresh(state.admit("r0", 100)) == [] and len(fresh(state.admit("r1", 100))) == 1, "the other is kept for r0"
    state.pulled("r0", 1)
    assert len(fresh(state.admit("r0", 100))) == 1


def test_a_filtered_fresh_group_is_replaced_within_the_step() -> None:
    state = replay()
    given = state.admit("r0", 100)
    state.end(given[0].index, "filtered", "zero_variance")
    again = state.admit("r0", 100)
    assert fresh(again) == [10] and len(again) == 1
    put(state, given[1:] + again)
    assert train(state) == [1, 2, 3, 10]


def test_a_fresh_group_of_a_dead_replica_goes_to_another_and_stays_fresh() -> None:
    state = replay(replicas=2)
    lost = fresh(state.admit("r0", 1))
    state.remove_replica("r0")
    assert lost == [0] and fresh(state.admit("r1", 100)) == [0]


def test_a_fresh_group_with_an_older_token_is_made_anew() -> None:
    state = replay()
    put(state, state.admit("r0", 100))
    train(state)
    given = state.admit("r0", 100)
    put(state, given[1:])
    state.put([make_group(given[0].index, given[0].prompt_id, [[1], [0, 1]])])
    assert state.take(1) is None and state.num_stale == 1, "version 0 is too old for the fresh lane only"
    put(state, state.admit("r0", 100))
    assert train(state) == [4, 5, 6, 10]


def test_the_token_cap_holds_back_neither_lane_of_the_next_batch() -> None:
    state = replay(max_queue_tokens=1)
    given = state.admit("r0", 100)
    assert len(given) == 4 and len(fresh(given)) == 1


def test_no_fresh_group_is_admitted_that_no_step_will_take() -> None:
    state = ReplayState(
        settings=AsyncSettings(fresh_fraction=0.25, max_staleness=2),
        groups_per_step=4,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        num_steps=2,
    )
    state.add_replica("r0", 0)
    for _ in range(2):
        put(state, state.admit("r0", 100))
        train(state)
    assert state.admit("r0", 100) == [] and state.ledger.num_admitted == 8 and state.num_wanted() == 0


@pytest.mark.parametrize("fraction", [0.25, 0.0])
def test_a_resumed_run_keeps_the_fresh_lane_or_does_without(tmp_path, fraction: float) -> None:
    journal = Journal.open(tmp_path / "events.jsonl")
    state = replay(journal=journal)
    state.admit("r0", 100)
    state = ReplayState.resume(
        list(Journal.read(journal.path)),
        step=0,
        incarnation=1,
        settings=AsyncSettings(fresh_fraction=fraction, max_staleness=2),
        groups_per_step=4,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        journal=journal,
    )
    state.add_replica("r0", 0)
    assert fresh(state.admit("r0", 100)) == ([0] if fraction else [])
    with pytest.raises(ConfigError, match="greatest"):
        state.set_max_staleness(3)
