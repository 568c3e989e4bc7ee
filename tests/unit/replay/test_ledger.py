"""The ledger as a fold: repeats, contradictions, late results, restoring."""

from __future__ import annotations

import pytest

from forge_async.core.errors import ForgeError, StalenessError
from forge_async.core.records import PromptId
from forge_async.replay import events as ev
from forge_async.replay import ledger as ledger_module
from forge_async.replay.entry import Effect, State
from forge_async.replay.history import failed_tries, surviving
from forge_async.replay.ledger import Ledger


def admitted(index: int) -> ev.Admitted:
    return ev.Admitted(index=index, prompt_id=PromptId(source="s", epoch=0, index=index), num_tokens=10)


def started(index: int, replica: str = "r", step: int = 0) -> ev.Started:
    return ev.Started(index=index, replica=replica, step=step)


def ready(index: int, num_tokens: int = 12, oldest_step: int = 0) -> ev.Ready:
    return ev.Ready(index=index, num_tokens=num_tokens, oldest_step=oldest_step)


def ended(index: int, outcome: str = "filtered", reason: str = "why") -> ev.Ended:
    return ev.Ended(index=index, outcome=outcome, reason=reason)


JOINED = ev.ReplicaJoined(replica="r", step=0)
IN_FLIGHT = [JOINED, admitted(0), started(0)]
TRAINED = [*IN_FLIGHT, ready(0), ev.Taken(step=0, indices=(0,)), ev.Trained(step=0)]


def test_a_group_goes_through_its_states_and_is_counted_once() -> None:
    ledger, seen = Ledger(), []
    for event in TRAINED:
        ledger.apply(event)
        ledger.check(deep=True)
        seen += [ledger.entries[0].state] if 0 in ledger.entries else []
    assert seen == [State.WAITING, State.IN_FLIGHT, State.READY, State.TAKEN, State.ENDED]
    assert ledger.outcomes == {"trained": 1} and ledger.num_trained == 1 and ledger.queue_tokens == 0


@pytest.mark.parametrize("length", range(1, len(TRAINED) + 1))
def test_repeating_any_event_changes_nothing(length: int) -> None:
    once, twice = Ledger.replay(TRAINED[:length]), Ledger.replay(TRAINED[:length])
    assert twice.apply(TRAINED[length - 1]) is Effect.REPEATED
    assert once == twice


@pytest.mark.parametrize(
    ("history", "event", "words"),
    [
        (IN_FLIGHT, ready(5), "never admitted"),
        ([*IN_FLIGHT, ready(0)], ready(0, num_tokens=13), "two rollouts share one index"),
        (TRAINED, ended(0), "cannot end as filtered"),
        ([*IN_FLIGHT, ended(0)], ended(0, "failed"), "cannot end as failed"),
        (IN_FLIGHT, ended(0, "trained"), "cannot end as 'trained'"),
        (IN_FLIGHT, ended(0, "lost"), "cannot end as 'lost'"),
        (IN_FLIGHT, admitted(2), "the next is 1"),
        (IN_FLIGHT, started(0, "other"), "cannot be given"),
        (TRAINED, ev.Requeued(index=0, reason=""), "cannot wait again"),
        (IN_FLIGHT, ev.Taken(step=0, indices=(0,)), "cannot take"),
        (TRAINED, ev.Taken(step=2, indices=()), "step 1 takes next"),
        (IN_FLIGHT, ev.Trained(step=0), "cannot be done"),
        (TRAINED, ev.Published(step=2), "learner is at 1"),
        (TRAINED, ev.Pulled(replica="r", step=1), "newest published is 0"),
        (TRAINED, ev.Pulled(replica="x", step=0), "never joined"),
        ([*TRAINED, ev.Published(step=1), ev.Pulled(replica="r", step=1)], ev.Pulled(replica="r", step=0), "only grow"),
        ([*TRAINED, ev.Published(step=1)], ev.ReplicaJoined(replica="r", step=1), "is here already"),
    ],
)
def test_a_contradiction_is_named_and_changes_nothing(history, event, words: str) -> None:
    ledger = Ledger.replay(history)
    with pytest.raises(StalenessError, match=words):
        ledger.apply(event)
    assert ledger == Ledger.replay(history)


def test_a_try_is_lost_with_its_replica_only_before_its_tokens_are_made() -> None:
    history = [JOINED, admitted(0), admitted(1), started(0), started(1), ev.ReplicaLeft(replica="r", made=(0,))]
    assert failed_tries([*history, ev.Closed(reason="stop")]) == {1: 1}
    assert failed_tries(history) == {0: 1, 1: 1}, "a crash loses what was being scored"
    ledger = Ledger.replay(history)
    assert ledger.waiting() == [1] and ledger.counts[State.IN_FLIGHT] == 1
    ledger.check(deep=True)


@pytest.mark.parametrize("outcome", ["failed", "expired", "cancelled"])
def test_a_result_after_the_group_was_given_up_is_counted_and_ignored(outcome: str) -> None:
    ledger = Ledger.replay([*IN_FLIGHT, ended(0, outcome)])
    assert ledger.apply(ready(0)) is Effect.LATE and ledger.apply(ended(0)) is Effect.LATE
    assert ledger.num_late == 2 and ledger.outcomes == {outcome: 1}


def test_a_dead_replicas_groups_wait_again_under_their_index_and_go_to_another() -> None:
    ledger = Ledger.replay([*IN_FLIGHT, ev.ReplicaJoined(replica="q", step=0), ev.ReplicaLeft(replica="r")])
    assert ledger.waiting() == [0] and ledger.num_admitted == 1
    ledger.apply(started(0, "q"))
    assert ledger.apply(ready(0)) is Effect.CHANGED, "whichever try is first counts"
    assert ledger.apply(ready(0, num_tokens=99)) is Effect.LATE, "the slower one does not"
    ledger.check(deep=True)


def test_tokens_are_reserved_by_estimate_and_counted_when_ready() -> None:
    ledger = Ledger(tokens_guess=10)
    for event in (*IN_FLIGHT, admitted(1)):
        ledger.apply(event)
    assert ledger.queue_tokens == 20
    ledger.apply(ready(0, num_tokens=42))
    assert ledger.queue_tokens == 52 and ledger.mean_tokens == 11


def test_restoring_undoes_what_came_after_its_step() -> None:
    after = [
        admitted(1),
        admitted(2),
        started(1),
        ready(1),
        ended(2),
        ev.Taken(step=1, indices=(1,)),
        ev.Trained(step=1),
    ]
    restored = ev.Restored(step=1, incarnation=1, num_attempts=2)
    ledger = Ledger.replay([*TRAINED, *after, restored])
    assert ledger == Ledger.replay([*TRAINED, restored])
    assert ledger.num_admitted == 1 and ledger.next_step == 1 and not ledger.replicas


def test_restoring_keeps_what_was_admitted_before_and_has_it_made_anew() -> None:
    history = [JOINED, admitted(0), admitted(1), admitted(2), admitted(3), started(0), started(1), started(2), ready(0)]
    history += [ready(1), ev.Taken(step=0, indices=(0,)), ev.Taken(step=1, indices=(1,)), ev.Trained(step=0)]
    ledger = Ledger.replay([*history, ev.Restored(step=1, incarnation=1, num_attempts=3)])
    assert ledger.waiting() == [1, 2, 3] and ledger.next_step == 1
    ledger.check(deep=True)


def test_restoring_twice_and_further_back_is_restoring_once() -> None:
    first, second = (ev.Restored(step=step, incarnation=inc, num_attempts=1) for step, inc in ((1, 1), (0, 2)))
    assert surviving([*TRAINED, first, admitted(1), second]) == [second]


def test_a_checkpoint_ahead_of_the_journal_is_refused() -> None:
    with pytest.raises(ForgeError, match="resume from a checkpoint of step 1 or less"):
        Ledger.replay([*TRAINED, ev.Restored(step=2, incarnation=1, num_attempts=1)])
    with pytest.raises(StalenessError, match="knows of 1 steps"):
        Ledger.replay(TRAINED).apply(ev.Restored(step=0, incarnation=1, num_attempts=1))


def test_closing_cancels_what_had_not_ended() -> None:
    ledger = Ledger.replay([*TRAINED, admitted(1), started(1), admitted(2), ev.Closed(reason="stop")])
    assert ledger.outcomes == {"trained": 1, "cancelled": 2} and not ledger.untaken
    ledger.check(deep=True)


def test_a_broken_count_is_noticed() -> None:
    ledger = Ledger.replay(TRAINED)
    ledger.num_admitted += 1
    with pytest.raises(StalenessError, match="Conservation is broken"):
        ledger.check()


def test_long_ended_groups_are_forgotten_but_stay_counted(monkeypatch) -> None:
    monkeypatch.setattr(ledger_module, "KEEP_ENDED", 3)
    ledger = Ledger()
    for index in range(20):
        ledger.apply(admitted(index))
        if index != 4:
            ledger.apply(ended(index))
    assert sorted(ledger.entries) == [4, 17, 18, 19] and ledger.outcomes == {"filtered": 19}
    assert ledger.apply(ready(0)) is Effect.LATE
    ledger.check(deep=True)
