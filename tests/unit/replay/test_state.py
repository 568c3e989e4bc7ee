"""The room as one object: admission, order at S = 0, age, resuming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forge_async.core.errors import FilterStallError, ForgeError, StalenessError
from forge_async.core.records import PromptId
from forge_async.replay.admission import Admission, Prompts
from forge_async.replay.ages import ages, check_age
from forge_async.replay.buffer import Buffer, group_bytes
from forge_async.replay.journal import Journal
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from tests.strategies import make_group

COMMON: dict[str, Any] = {"prompts": Prompts(source="s", epoch_size=5), "tokens_guess": 10}


def replay(num: int = 2, replicas: int = 1, journal: Journal | None = None, **dials) -> ReplayState:
    state = ReplayState(settings=AsyncSettings(**dials), groups_per_step=num, journal=journal, **COMMON)
    for which in range(replicas):
        state.add_replica(f"r{which}", 0)
    return state


def put(state: ReplayState, given: list[Admission], size: int = 3) -> None:
    incarnation = max((number for number, _ in state.ledger.restores), default=0)
    state.put([make_group(one.index, one.prompt_id, [[one.min_step] * size], incarnation=incarnation) for one in given])


def step_of(state: ReplayState, step: int) -> list[int]:
    """Train one step and let every replica pull; returns the indices of the batch."""
    batch = state.take(step)
    assert batch is not None
    state.trained(step)
    state.published(step + 1)
    for name in state.ledger.replicas:
        state.pulled(name, step + 1)
    return [group.index for group in batch]


def indices(given: list[Admission]) -> list[int]:
    return [one.index for one in given]


def test_prompts_follow_each_other_through_epochs() -> None:
    given = replay(num=4).admit("r0", 100)
    assert [str(one.prompt_id) for one in given][:7] == ["s:0:0", "s:0:1", "s:0:2", "s:0:3", "s:0:4", "s:1:0", "s:1:1"]


def test_a_source_of_another_name_begins_at_its_beginning() -> None:
    last = PromptId(source="old", epoch=3, index=1)
    assert str(COMMON["prompts"].after(last)) == "s:0:0"


def test_depth_is_given_once_and_again_only_after_a_pull() -> None:
    state = replay(num=2, max_staleness=2)
    given = state.admit("r0", 100)
    assert len(given) == 6 and state.admit("r0", 100) == []
    assert "depth 6 is used up" in state.why_no_admission("r0")
    put(state, given)
    assert state.take(0) is not None
    assert state.admit("r0", 100) == [], "taken groups count until the replica has pulled what they made"
    state.trained(0)
    state.published(1)
    assert state.admit("r0", 100) == []
    state.pulled("r0", 1)
    assert indices(state.admit("r0", 100)) == [6, 7]


def test_a_replica_that_is_slow_to_pull_does_not_idle_the_other() -> None:
    state = replay(num=2, replicas=2, max_staleness=1)
    put(state, state.admit("r0", 100) + state.admit("r1", 100))
    state.take(0)
    state.trained(0)
    state.published(1)
    state.pulled("r1", 1)
    assert state.admit("r0", 100) == [] and indices(state.admit("r1", 1)) == [4]
    put(state, [Admission(index=4, prompt_id=PromptId(source="s", epoch=0, index=4), min_step=1, attempt=5)])
    assert state.admit("r0", 100) == [] and indices(state.admit("r1", 1)) == [5]


def test_a_replica_holds_no_more_than_its_speed_is_worth_and_says_so() -> None:
    state = replay(num=4, replicas=2, max_staleness=1)
    assert indices(state.admit("r0", 100)) == [0, 1, 2, 3], "before anything is known, half of the depth"
    assert state.why_no_admission("r0") == "r0 has 4 groups in flight, as many as its measured speed is worth"
    assert indices(state.admit("r1", 100)) == [4, 5, 6, 7]


def test_failing_quickly_earns_a_replica_no_groups() -> None:
    state = replay(num=4, replicas=2, max_staleness=1)
    for _ in range(20):
        one = state.admit("r0", 1)[0]
        state.end(one.index, "failed", "engine", attempt=one.attempt)
        put(state, state.admit("r1", 1))
        if state.take(state.ledger.next_step) is not None:
            step_of(state, state.ledger.next_step - 1)
    assert state.admitter.fair_share(state.admitter.lanes.normal, "r0") == 1


def test_an_end_that_was_asked_for_is_not_told_again() -> None:
    state = replay(num=2, max_staleness=1)
    (given, *_) = state.admit("r0", 2)
    state.end(given.index, "filtered", "zero_variance", given.attempt)
    state.end(given.index, "filtered", "zero_variance", given.attempt)
    assert state.take_ended() == []


def test_a_filtered_group_frees_its_slot_at_once() -> None:
    state = replay(num=2, max_staleness=1)
    given = state.admit("r0", 100)
    assert state.admit("r0", 1) == []
    assert state.end(given[0].index, "filtered", "zero_variance", attempt=given[0].attempt)
    assert indices(state.admit("r0", 100)) == [4]


def test_the_token_cap_stops_admission_but_never_the_next_batch() -> None:
    state = replay(num=2, max_staleness=4, max_queue_tokens=35)
    given = state.admit("r0", 100)
    assert len(given) == 3 and "30 of 35 tokens" in state.why_no_admission("r0")
    put(state, given, size=500)
    step_of(state, 0)
    assert indices(state.admit("r0", 100)) == [3], "one untaken group of 501 tokens is above the cap; a batch needs two"


def test_stream_is_limited_by_tokens_only() -> None:
    state = replay(num=2, buffer="stream", max_queue_tokens=1000)
    assert len(state.admit("r0", 10**6)) == 100 and state.state()["queue/capacity"] == 100
    state.put(
        [
            make_group(99, PromptId(source="s", epoch=19, index=4), [[0]]),
            make_group(3, PromptId(source="s", epoch=0, index=3), [[0]]),
        ]
    )
    assert [group.index for group in state.take(0) or []] == [3, 99]


# S = 0.


def test_at_zero_a_round_belongs_to_replicas_by_index_whoever_asks_first() -> None:
    for order in (["r0", "r1"], ["r1", "r0"]):
        state = replay(num=4, replicas=2, max_staleness=0)
        given = {name: indices(state.admit(name, 100)) for name in order}
        assert given == {"r0": [0, 2], "r1": [1, 3]}


def test_at_zero_refill_waits_until_all_is_quiet() -> None:
    state = replay(num=4, replicas=2, max_staleness=0)
    first, second = state.admit("r0", 100), state.admit("r1", 100)
    state.end(first[0].index, "filtered", "zero_variance")
    assert state.admit("r0", 100) == [] and "round in progress" in state.why_no_admission("r0")
    put(state, first[1:] + second)
    assert state.admit("r1", 100) == [] and indices(state.admit("r0", 100)) == [4], "group 4 is the first replica's"
    assert state.take(0) is None


def test_at_zero_every_replica_must_have_pulled() -> None:
    state = replay(num=2, replicas=2, max_staleness=0)
    put(state, state.admit("r0", 100) + state.admit("r1", 100))
    state.take(0)
    state.trained(0)
    state.published(1)
    state.pulled("r0", 1)
    assert state.admit("r0", 100) == [] and state.why_no_admission("r0") == "other replicas have not pulled yet"
    state.pulled("r1", 1)
    assert indices(state.admit("r0", 100)) == [2]


def with_batches_taken(num_steps: int) -> ReplayState:
    """The batches of so many steps were taken, and nobody has said that one is done."""
    state = replay(num=2, max_staleness=3)
    for step in range(num_steps):
        put(state, state.admit("r0", 2))
        state.take(step)
    return state


def test_a_published_version_says_that_its_steps_are_done_but_not_that_they_were_taken() -> None:
    state = with_batches_taken(2)
    state.published(2)
    state.trained(0)
    assert (state.ledger.num_trained, state.ledger.published, state.ledger.outcomes["trained"]) == (2, 2, 4)
    with pytest.raises(StalenessError, match="Step 2 cannot be done"):
        state.published(3)


def test_steps_that_are_done_may_be_told_together() -> None:
    state = with_batches_taken(3)
    state.trained(1)
    assert (state.ledger.num_trained, state.ledger.outcomes["trained"]) == (2, 4)


def test_at_zero_a_resumed_run_admits_as_if_it_had_never_stopped(tmp_path) -> None:
    """Whatever happened in step 2 before the crash, its round is admitted again with the same indices and prompts."""

    def play(state: ReplayState, steps: range) -> list[list[tuple[int, str]]]:
        seen = []
        for step in steps:
            while state.take(step) is None:
                given = [one for name in sorted(state.ledger.replicas) for one in state.admit(name, 100)]
                seen.append([(one.index, str(one.prompt_id)) for one in given])
                for one in given:
                    if one.index % 3 == 0:
                        state.end(one.index, "filtered", "zero_variance")
                put(state, [one for one in given if one.index % 3])
            step_of(state, step)
        return seen

    whole = play(replay(num=4, replicas=2, max_staleness=0), range(5))
    journal = Journal.open(tmp_path / "events.jsonl")
    begun = replay(num=4, replicas=2, max_staleness=0, journal=journal)
    seen = play(begun, range(2))
    begun.end(begun.admit("r0", 100)[0].index, "filtered", "zero_variance")
    resumed = resume(journal, step=2, max_staleness=0, num=4)
    assert seen + play(resumed, range(2, 5)) == whole


def resume(journal: Journal, step: int, num: int = 2, incarnation: int = 1, replicas: int = 2, **dials) -> ReplayState:
    state = ReplayState.resume(
        list(Journal.read(journal.path)),
        step=step,
        incarnation=incarnation,
        settings=AsyncSettings(**dials),
        groups_per_step=num,
        journal=journal,
        **COMMON,
    )
    for which in range(replicas):
        state.add_replica(f"r{which}", step)
    return state


# Taking.


def test_asking_again_gives_the_same_batch_until_the_next_step() -> None:
    state = replay(num=2, max_staleness=1)
    put(state, state.admit("r0", 100))
    first = state.take(0)
    assert state.take(0) is first and state.take(1) is not None
    with pytest.raises(StalenessError, match="step 2 takes next"):
        state.take(0)


def test_metrics_split_age_into_flight_and_queue() -> None:
    state = replay(num=1, max_staleness=2)
    given = state.admit("r0", 3)
    put(state, given[:1])
    step_of(state, 0)
    put(state, given[1:])
    step_of(state, 1)
    step_of(state, 2)
    figures = state.state()
    assert figures["staleness/max"] == figures["staleness/mean"] == 2
    assert figures["staleness/in_flight_mean"] == 1 and figures["staleness/in_queue_mean"] == 1
    assert figures["groups/trained"] == 3 and figures["groups/admitted"] == 3


def test_ages_are_counted_for_each_sample_and_leave_out_samples_without_tokens() -> None:
    group = make_group(0, PromptId(source="s", epoch=0, index=0), [[4, 5], [5], [2, 5], []])
    found = ages([group.samples.oldest_steps()], step=6, ready_at_steps=[5])
    assert found.staleness.tolist() == [2, 1, 4]
    assert np.array_equal(found.in_flight + found.in_queue, found.staleness)
    check_age(group, 6, 4)
    with pytest.raises(StalenessError, match="Group 0 is too old for step 6: .* version 2, 4 steps before"):
        check_age(group, 6, 3)


# A replica that reported a pull too early makes groups that are older than they claim.


def with_an_old_group(on_stale: str) -> ReplayState:
    state = replay(num=2, max_staleness=0, on_stale=on_stale)
    put(state, state.admit("r0", 100))
    step_of(state, 0)
    given = state.admit("r0", 100)
    put(state, given[1:])
    state.put([make_group(given[0].index, given[0].prompt_id, [[0], [1]])])
    return state


def test_on_stale_wait_makes_the_same_group_anew() -> None:
    state = with_an_old_group("wait")
    assert state.take(1) is None and state.state()["groups/requeued"] == 1
    again = state.admit("r0", 100)
    assert indices(again) == [2] and str(again[0].prompt_id) == "s:0:2"
    put(state, again)
    assert step_of(state, 1) == [2, 3] and state.state()["groups/stale"] == 1


def test_on_stale_drop_ends_the_group_and_goes_on() -> None:
    state = with_an_old_group("drop")
    assert state.take(1) is None and state.state()["groups/expired"] == 1
    assert state.take_ended() == [(2, "expired", "too_old")] and state.take_ended() == []
    put(state, state.admit("r0", 100))
    assert step_of(state, 1) == [3, 4]


def test_on_stale_reweight_lets_the_group_through_and_counts_it() -> None:
    state = with_an_old_group("reweight")
    assert step_of(state, 1) == [2, 3]
    assert state.state()["groups/stale"] == 1 and state.state()["staleness/max"] == 1


def test_on_stale_raise_names_group_age_and_bound() -> None:
    with pytest.raises(StalenessError, match=r"Group 2 .* version 0, 1 steps before, .* bound is max_staleness=0"):
        with_an_old_group("raise").take(1)


# Tries that come to nothing, and runs that train on nothing.


def test_a_group_whose_tries_are_used_up_ends_as_failed() -> None:
    state = replay(num=1, max_staleness=0, max_attempts=3)
    tries = []
    for num in range(3):
        tries += state.admit("r0", 1)
        assert state.retry(tries[-1].index, "reward_timeout", tries[-1].attempt) == (num < 2)
    assert indices(tries) == [0, 0, 0] and state.ledger.reasons == {("failed", "reward_timeout"): 1}
    assert not state.retry(0, "reward_timeout", tries[-1].attempt) and indices(state.admit("r0", 1)) == [1]


def test_an_old_try_cannot_give_up_what_a_newer_one_makes() -> None:
    state = replay(num=1, replicas=2, max_attempts=2)
    old = state.admit("r0", 1)[0]
    state.remove_replica("r0")
    new = state.admit("r1", 1)[0]
    assert not state.retry(old.index, "engine died", old.attempt) and state.state()["groups/late"] == 1
    assert state.ledger.entries[new.index].attempt == new.attempt


def test_a_group_that_takes_replicas_down_with_it_ends_as_failed() -> None:
    state = replay(num=1, max_staleness=0, max_attempts=2)
    for num in range(2):
        state.add_replica(f"s{num}", 0)
        state.remove_replica("r0" if num == 0 else "s0")
        if num == 0:
            assert indices(state.admit("s0", 1)) == [0]
    assert state.ledger.waiting() == [0]
    assert indices(state.admit("s1", 1)) == [0], "one of the two deaths was before it was in flight"
    state.remove_replica("s1")
    state.add_replica("s2", 0)
    assert indices(state.admit("s2", 1)) == [1] and state.ledger.reasons == {("failed", "tries_used_up"): 1}
    assert state.take_ended() == [(0, "failed", "tries_used_up")]


def crash_while_group_zero_is_made(journal: Journal, times: int, closed: bool) -> ReplayState:
    """The same group is in flight each time that the run ends."""
    state = replay(num=1, max_staleness=0, max_attempts=3, journal=journal)
    for _ in range(times):
        assert indices(state.admit("r0", 1)) == [0]
        if closed:
            state.close("stopped by hand")
        state = resume(journal, step=0, num=1, replicas=1, max_staleness=0, max_attempts=3)
    return state


def test_a_resumed_run_does_not_hang_on_the_group_that_crashes_it(tmp_path) -> None:
    state = crash_while_group_zero_is_made(Journal.open(tmp_path / "events.jsonl"), 3, closed=False)
    assert indices(state.admit("r0", 1)) == [1] and state.state()["groups/failed"] == 1


def test_stopping_a_run_by_hand_is_no_failed_try(tmp_path) -> None:
    state = crash_while_group_zero_is_made(Journal.open(tmp_path / "events.jsonl"), 5, closed=True)
    assert indices(state.admit("r0", 1)) == [0] and state.state()["groups/failed"] == 0


def test_a_run_whose_every_group_is_filtered_stops_and_names_the_filter() -> None:
    state = replay(num=2, max_staleness=0, max_filtered_batches=2)
    for num in range(4):
        one = state.admit("r0", 1)[0]
        state.end(one.index, *(("failed", "reward") if num == 1 else ("filtered", "zero_variance")))
    words = r"last 4, .*max_filtered_batches=2.*filtered \(zero_variance\): 3, failed \(reward\): 1"
    with pytest.raises(FilterStallError, match=words):
        state.admit("r0", 1)
    with pytest.raises(FilterStallError, match=words):
        state.take(0)


def test_a_group_that_is_ready_in_between_shows_that_the_filter_lets_some_through() -> None:
    state = replay(num=2, max_staleness=1, max_filtered_batches=1)
    for num in range(9):
        one = state.admit("r0", 1)[0]
        if num % 2:
            state.end(one.index, "filtered", "zero_variance")
        elif num < 8:
            put(state, [one])
        if state.take(state.ledger.next_step) is not None:
            step_of(state, state.ledger.next_step - 1)
    assert state.state()["groups/filtered"] == 4


# Wrong, repeated and late calls.


def test_a_strange_replica_is_refused() -> None:
    with pytest.raises(ForgeError, match="add_replica"):
        replay().admit("nobody", 1)


def test_a_group_without_samples_or_of_another_prompt_is_refused() -> None:
    state = replay()
    one = state.admit("r0", 1)[0]
    with pytest.raises(StalenessError, match="has no samples"):
        state.put([make_group(one.index, one.prompt_id, [])])
    with pytest.raises(StalenessError, match="is of prompt s:0:0"):
        state.put([make_group(one.index, PromptId(source="s", epoch=0, index=4), [[0]])])


def test_a_failure_of_a_try_that_is_no_longer_awaited_ends_nothing() -> None:
    state = replay(replicas=2)
    old = state.admit("r0", 1)[0]
    state.remove_replica("r0")
    assert not state.end(old.index, "failed", "engine died", attempt=old.attempt)
    new = state.admit("r1", 1)[0]
    assert new.index == old.index and not state.end(old.index, "failed", "engine died", attempt=old.attempt)
    assert state.end(new.index, "failed", "deadline", attempt=new.attempt)


def test_a_group_moves_only_to_a_replica_at_or_above_its_version() -> None:
    state = replay(num=1, replicas=2, max_staleness=3)
    put(state, state.admit("r0", 1))
    state.take(0)
    state.trained(0)
    state.published(1)
    state.pulled("r0", 1)
    moved = state.admit("r0", 1)[0]
    state.remove_replica("r0")
    assert moved.index not in indices(state.admit("r1", 1))
    state.pulled("r1", 1)
    assert moved.index in indices(state.admit("r1", 1))


def test_a_closed_run_admits_nothing_and_ignores_what_comes() -> None:
    state = replay()
    given = state.admit("r0", 2)
    state.close("stopped")
    assert state.admit("r0", 2) == [] and state.why_no_admission("r0") == "the run is closed"
    put(state, given)
    assert state.state()["groups/cancelled"] == 2 and state.state()["groups/late"] == 2 and len(state.buffer) == 0
    with pytest.raises(StalenessError, match="closed"):
        state.take(0)


def test_what_dead_weights_made_is_discarded_after_a_restore(tmp_path) -> None:
    journal = Journal.open(tmp_path / "events.jsonl")
    state = replay(num=1, max_staleness=1, journal=journal)
    put(state, state.admit("r0", 100))
    step_of(state, 0)
    step_of(state, 1)
    late = state.admit("r0", 1)[0]
    resumed = resume(journal, step=1, num=1, max_staleness=1)
    assert indices(resumed.admit("r0", 1) + resumed.admit("r1", 1)) == [1, 2]
    made_by_version_2 = make_group(late.index, late.prompt_id, [[2]])
    assert resumed.put([made_by_version_2]) == 0 and resumed.state()["groups/late"] == 1
    assert indices(resumed.admit("r1", 100)) == [2], "it might have been the awaited result, so it is made anew"
    assert resumed.put([make_group(late.index, late.prompt_id, [[1]])]) == 1, "version 1 is part of the history"


def test_a_wait_is_explained_by_the_group_that_is_missing() -> None:
    state = replay(num=2, max_staleness=0)
    given = state.admit("r0", 100)
    put(state, given[1:])
    assert state.why_no_batch() == (
        "step 0 needs 2 groups: 1 are ready, 1 in flight, 0 waiting for a replica; "
        "the oldest that is missing is group 0 (on replica r0)"
    )


def test_the_buffer_counts_what_it_holds() -> None:
    buffer, group = Buffer(), make_group(3, PromptId(source="s", epoch=0, index=3), [[0, 0], [0]])
    buffer.put(group, group.samples.oldest_steps())
    buffer.put(group, group.samples.oldest_steps())
    assert len(buffer) == 1 and buffer.num_tokens == 5 and buffer.num_bytes == group_bytes(group) > 0
    assert buffer.drop_all([3, 4]) == [group] and buffer.num_tokens == buffer.num_bytes == len(buffer) == 0


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_group_is_admitted_that_no_step_will_take(staleness: int) -> None:
    state = ReplayState(settings=AsyncSettings(max_staleness=staleness), groups_per_step=2, num_steps=3, **COMMON)
    state.add_replica("r0", 0)
    admitted: list[Admission] = []
    for step in range(3):
        given = state.admit("r0", 10)
        admitted += given
        put(state, given)
        step_of(state, step)
    assert [admission.index for admission in admitted] == list(range(6))
    assert state.admit("r0", 10) == []
    assert "no further group" in state.why_no_admission("r0")
