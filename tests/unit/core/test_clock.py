import asyncio

import pytest

from forge_async.core.clock import SystemClock, within
from forge_async.core.errors import StallError

WORDS = {"who": "The rollout worker", "waits_for": "completions", "from_whom": "policy_0"}


async def test_what_comes_in_time_is_returned():
    assert await within(asyncio.sleep(0, "x"), 1.0, **WORDS) == "x"


async def test_a_wait_past_its_deadline_is_told_by_name_and_cancelled():
    cancelled = asyncio.Event()

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(StallError, match="The rollout worker waited 0.01 s for completions from policy_0"):
        await within(never(), 0.01, **WORDS)
    assert cancelled.is_set()


async def test_an_error_of_the_awaited_is_its_own():
    async def fail(error):
        raise error

    with pytest.raises(KeyError):
        await within(fail(KeyError("x")), 1.0, **WORDS)
    with pytest.raises(TimeoutError, match="the socket") as caught:
        await within(fail(TimeoutError("the socket")), 1.0, **WORDS)
    assert not isinstance(caught.value, StallError)


async def test_cancelling_the_wait_cancels_what_it_waits_for():
    seen = []

    async def never():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = asyncio.create_task(within(never(), 10.0, **WORDS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["cancelled"]


async def test_the_system_clock_never_goes_back():
    clock = SystemClock()
    before = clock.now_s()
    await clock.sleep(0.001)
    assert clock.now_s() >= before + 0.001
