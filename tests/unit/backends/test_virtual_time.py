import asyncio
import time

import pytest

from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.core.errors import StallError


def test_hours_pass_in_no_time_and_in_order():
    order = []

    async def scenario():
        async def at(hours):
            await LoopClock().sleep(3600.0 * hours)
            order.append((hours, LoopClock().now_s()))

        await asyncio.gather(at(3), at(1), at(2))

    begun = time.process_time()
    run_virtually(scenario())
    assert order == [(1, 3600.0), (2, 7200.0), (3, 10800.0)]
    assert time.process_time() - begun < 1.0


def test_deadlines_of_asyncio_are_on_the_same_clock():
    async def scenario():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(50.0):
                await asyncio.sleep(60.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(scenario()) == pytest.approx(50.0)


def test_work_counts_only_where_it_is_asked_for():
    async def scenario():
        begun = time.process_time()
        while time.process_time() < begun + 0.01:
            pass
        await asyncio.sleep(5.0)
        return asyncio.get_running_loop().time()

    assert run_virtually(scenario()) == 5.0
    assert run_virtually(scenario(), count_work=True) >= 5.01


def test_a_deadlock_is_an_error_and_not_a_hang():
    with pytest.raises(StallError, match="every task waits for another"):
        run_virtually(asyncio.Event().wait())
