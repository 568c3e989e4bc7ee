"""Laws of the limit on an engine's sequences, and what it does to an engine of known capacity."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.core.errors import ConfigError
from forge_async.policy.concurrency import UNLIMITED, ConcurrencyLimit, concurrency_limit
from forge_async.policy.ports import Occupancy

occupancies = st.builds(
    Occupancy,
    num_running=st.integers(0, 600),
    num_waiting=st.sampled_from([0, 0, 1, 50]),
    num_preemptions=st.just(0),
    kv_usage=st.floats(0, 1),
)
observations = st.tuples(occupancies, st.sampled_from([0, 0, 1, 9]), st.sampled_from([0, 3]))


def observe(limit, observation):
    occupancy, num_preempted, num_queued = observation
    limit.observe(occupancy, num_preempted=num_preempted, num_queued=num_queued)


@given(st.lists(observations), st.integers(1, 20), st.integers(0, 500))
def test_the_limit_stays_within_its_bounds(seen, low, span):
    limit = ConcurrencyLimit(low, low + span)
    for observation in seen:
        observe(limit, observation)
        assert low <= limit.num_sequences <= low + span


@given(st.lists(observations), observations)
def test_pressure_never_raises_it_and_its_absence_never_lowers_it(seen, last):
    limit = ConcurrencyLimit(1, 512)
    for observation in seen:
        observe(limit, observation)
    before = limit.num_sequences
    observe(limit, last)
    occupancy, num_preempted, num_queued = last
    pressed = num_preempted or occupancy.num_waiting or occupancy.kv_usage > 0.95
    if pressed:
        assert limit.num_sequences <= before
    else:
        assert before <= limit.num_sequences <= before + 1
    if not pressed and not num_queued:
        assert limit.num_sequences == before, "it does not grow while nobody asks for more"


@given(observations, st.integers(1, 400))
def test_a_fixed_limit_is_moved_by_nothing(observation, size):
    limit = concurrency_limit(str(size), 512)
    observe(limit, observation)
    assert (limit.num_sequences, limit.moves) == (size, False)


@settings(max_examples=40)
@given(st.integers(8, 400), st.integers(1, 512))
def test_it_settles_where_the_engine_is_nearly_full_and_nothing_waits(capacity, most):
    """Sequences of 8 to 40 steps' length; the engine has room for `capacity` of them, and there are always more."""
    limit, running, waiting, number, trace = ConcurrencyLimit(1, most), [], 0, 0, []
    for _ in range(4000):
        while len(running) + waiting < limit.num_sequences:
            number += 1
            if len(running) < capacity:
                running.append(8 + number * 7 % 33)
            else:
                waiting += 1
        limit.observe(
            Occupancy(
                num_running=len(running), num_waiting=waiting, num_preemptions=0, kv_usage=len(running) / capacity
            ),
            num_preempted=0,
            num_queued=5,
        )
        running = [left - 1 for left in running if left > 1]
        while waiting and len(running) < capacity:
            waiting, number = waiting - 1, number + 1
            running.append(8 + number * 7 % 33)
        trace.append((len(running), waiting))
    drained = next(step for step, (_, waits) in enumerate(trace) if not waits)
    settled = trace[drained + 200 :]
    assert sum(waits > 0 for _, waits in settled) < 0.1 * len(settled), "preempting and queueing is the exception"
    mean = sum(size for size, _ in settled) / len(settled)
    assert mean >= 0.5 * min(capacity, most) - 1


def test_the_words_of_the_setting():
    assert concurrency_limit("all", 512).num_sequences == UNLIMITED
    auto = concurrency_limit("auto", 512)
    assert (auto.num_sequences, auto.moves) == (512, True)
    for word in ("", "0", "-3", "2.5", "many"):
        with pytest.raises(ConfigError, match="policy.concurrency"):
            concurrency_limit(word, 512)
