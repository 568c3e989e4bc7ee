"""What a member of a broadcast keeps until it is asked for, and the memory that it uses again."""

from __future__ import annotations

import threading

import pytest

from forge_async.weights.inbox import Inbox

pytestmark = pytest.mark.timeout(30)
LONG_S = 20.0
TICK_S = 0.02
"""Patience of those whose clock the test moves; they look at it about so often."""


class TestClock:
    """Stands still until it is told to move, and knows how often it was looked at."""

    __test__ = False

    def __init__(self):
        self.now_s, self._num_looks, self._looked = 0.0, 0, threading.Condition()

    def __call__(self):
        with self._looked:
            self._num_looks += 1
            self._looked.notify_all()
            return self.now_s

    def wait_for_looks(self, num):
        """Wait until it was looked at so many times more."""
        with self._looked:
            wanted = self._num_looks + num
            assert self._looked.wait_for(lambda: self._num_looks >= wanted, 10)


def taken_by_a_thread(inbox, number, stall_s=LONG_S, total_s=LONG_S):
    """Start to wait for a number; returns what waits for the answer."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(inbox.take(number, stall_s, total_s)))
    thread.start()

    def answer():
        thread.join(10)
        assert not thread.is_alive(), "it still waits"
        return answers[0]

    return answer


def test_a_value_is_waited_for_taken_once_and_never_given_under_another_number():
    inbox = Inbox()
    answer = taken_by_a_thread(inbox, 2)
    inbox.begin()
    inbox.put(1, "one")
    inbox.begin()
    inbox.put(2, "two")
    assert answer() == "two"
    assert inbox.take(2, LONG_S, LONG_S) is None
    assert inbox.take(1, LONG_S, LONG_S) == "one"


@pytest.mark.parametrize("end", ["miss", "abandon"])
def test_who_waits_for_what_will_not_come_is_told_at_once(end):
    clock = TestClock()
    inbox = Inbox(clock)
    answer = taken_by_a_thread(inbox, 3, stall_s=TICK_S)
    clock.wait_for_looks(2)  # it waits
    if end == "miss":
        inbox.miss(3)
    else:
        inbox.abandon()
    assert answer() is None


def test_patience_lasts_as_long_as_something_moves_and_never_longer_than_in_all():
    clock = TestClock()
    inbox = Inbox(clock)
    answer = taken_by_a_thread(inbox, 1, stall_s=TICK_S)
    clock.wait_for_looks(2)
    for _ in range(8):
        clock.now_s += 0.8 * TICK_S
        inbox.progress()
        clock.wait_for_looks(2)
    inbox.put(1, "late")
    assert answer() == "late"

    answer = taken_by_a_thread(inbox, 2, stall_s=TICK_S)
    clock.wait_for_looks(2)
    clock.now_s += 1.1 * TICK_S
    assert answer() is None, "nothing moved"

    answer = taken_by_a_thread(inbox, 2, stall_s=TICK_S, total_s=2.0 * TICK_S)
    clock.wait_for_looks(2)
    for _ in range(3):
        clock.now_s += 0.8 * TICK_S
        inbox.progress()
    assert answer() is None, "something moved, for too long"


def test_values_that_nobody_takes_make_room_for_later_ones():
    inbox = Inbox()
    for number in range(1, 6):
        inbox.begin()
        inbox.put(number, number)
    assert [inbox.take(number, LONG_S, LONG_S) for number in range(1, 6)] == [None, None, None, 4, 5]
