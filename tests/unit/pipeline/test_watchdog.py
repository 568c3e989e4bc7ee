import asyncio

import pytest

from forge_async.core.errors import ActorDiedError, StallError
from forge_async.pipeline.watchdog import Watchdog


class ManualClock:
    """Stands still until it is moved."""

    def __init__(self):
        self.time_s = 100.0

    def now_s(self):
        return self.time_s

    async def sleep(self, duration_s):
        self.time_s += duration_s
        await asyncio.sleep(0)


class Dog:
    """A watchdog, its clock and what it said."""

    def __init__(self, explain=None, warn_after_s=10.0):
        self.clock, self.warnings = ManualClock(), []

        async def cause():
            return "step 3 needs 4 groups: 1 is ready"

        self.watchdog = Watchdog(
            warn_after_s=warn_after_s, clock=self.clock, warn=self.warnings.append, explain=explain or cause
        )

    async def after(self, duration_s):
        self.clock.time_s += duration_s
        await self.watchdog.look()


async def test_a_long_wait_is_told_with_who_what_whom_and_why_and_again_when_it_has_doubled():
    dog = Dog()
    with dog.watchdog.waiting("the learner", "the batch of step 3", "the replay actor", 100.0):
        await dog.after(9.0)
        assert dog.warnings == []
        await dog.after(1.0)
        assert dog.warnings == [
            "the learner has waited 10 s for the batch of step 3 from the replay actor; "
            "step 3 needs 4 groups: 1 is ready."
        ]
        await dog.after(5.0)
        assert len(dog.warnings) == 1
        await dog.after(5.0)
        assert len(dog.warnings) == 2


async def test_a_wait_past_its_limit_ends_the_run_with_the_whole_picture():
    dog = Dog()
    with (
        dog.watchdog.waiting("policy_0", "room for groups", "the learner"),
        dog.watchdog.waiting("the learner", "the batch of step 3", "the replay actor", 100.0),
        pytest.raises(StallError) as caught,
    ):
        await dog.after(100.0)
    assert str(caught.value) == (
        "the learner has waited 100 s for the batch of step 3 from the replay actor; step 3 needs 4 groups: 1 is "
        "ready; meanwhile policy_0 has waited 100 s for room for groups from the learner."
    )


async def test_a_wait_that_is_a_loops_right_is_never_a_stall():
    dog = Dog()
    with dog.watchdog.waiting("policy_0", "room for groups", "the learner"):
        await dog.after(1e6)
    assert dog.warnings == []


async def test_a_wait_that_has_ended_is_forgotten():
    dog = Dog()
    with dog.watchdog.waiting("the learner", "a step", "its ranks", 5.0):
        pass
    with pytest.raises(ZeroDivisionError), dog.watchdog.waiting("the learner", "a step", "its ranks", 5.0):
        raise ZeroDivisionError
    await dog.after(1e6)


async def test_a_replay_actor_that_cannot_say_why_does_not_hide_the_stall():
    async def dead():
        raise ActorDiedError("replay was killed.")

    dog = Dog(dead)
    with dog.watchdog.waiting("the learner", "a step", "its ranks", 50.0):
        await dog.after(10.0)
        assert "could not be asked why (replay was killed.)" in dog.warnings[0]


async def test_the_watchdog_looks_by_itself():
    dog = Dog()
    with dog.watchdog.waiting("the learner", "a step", "its ranks", 50.0), pytest.raises(StallError, match="50 s"):
        await dog.watchdog.run()
    assert [warning.split(" for ")[0] for warning in dog.warnings] == [
        f"the learner has waited {seconds} s" for seconds in (10, 20, 40)
    ]
