import asyncio

import pytest

from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.core.errors import FilterStallError, StallError
from forge_async.pipeline.batch_ahead import BatchAhead

pytestmark = pytest.mark.timeout(30)


class Source:
    """Has the batch of step s ready s * `every_s` seconds after the beginning."""

    def __init__(self, every_s=0.0, fails_at=None):
        self.every_s, self.fails_at = every_s, fails_at
        self.asked = []
        """(step, when, deadline) of each call."""

    async def take(self, step, deadline_s):
        now_s = LoopClock().now_s()
        self.asked.append((step, now_s, deadline_s))
        if step == self.fails_at:
            raise FilterStallError("all were filtered")
        missing_s = step * self.every_s - now_s
        if missing_s > deadline_s:
            await asyncio.sleep(deadline_s)
            raise StallError(f"waited {deadline_s:g} s")
        await asyncio.sleep(max(missing_s, 0.0))
        return f"batch {step}"

    def ahead(self, end=9):
        return BatchAhead(self.take, end=end, clock=LoopClock())


def test_the_next_batch_is_on_its_way_while_a_step_trains():
    source = Source(every_s=5.0)

    async def train():
        batches, ends = source.ahead(end=3), []
        for step in range(3):
            assert await batches.take(step, 100.0) == f"batch {step}"
            ends.append(LoopClock().now_s())
            await asyncio.sleep(4.0)
        return ends

    assert run_virtually(train()) == [0.0, 5.0, 10.0]
    assert [(step, when) for step, when, _ in source.asked] == [(0, 0.0), (1, 0.0), (2, 5.0)], "each once, none after"


def test_without_an_end_each_batch_is_asked_for_when_its_step_begins():
    source = Source()

    async def train():
        batches = source.ahead(end=0)
        for step in range(3):
            await batches.take(step, 100.0)
            await asyncio.sleep(4.0)

    run_virtually(train())
    assert [(step, when) for step, when, _ in source.asked] == [(0, 0.0), (1, 4.0), (2, 8.0)]


@pytest.mark.parametrize("late_s", [17.0, 19.0])
def test_a_deadline_counts_from_the_beginning_of_the_step_that_waits(late_s):
    source = Source(every_s=late_s)

    async def train():
        batches = source.ahead()
        await batches.take(0, 10.0)
        await asyncio.sleep(8.0)  # the step trains until second 8; the next may wait until 18
        try:
            return await batches.take(1, 10.0), LoopClock().now_s()
        except StallError:
            return None, LoopClock().now_s()
        finally:
            batches.close()

    assert run_virtually(train()) == (("batch 1", 17.0) if late_s == 17.0 else (None, 18.0))
    assert source.asked[:3] == [(0, 0.0, 10.0), (1, 0.0, 10.0), (1, 10.0, 8.0)]


def test_a_failure_ahead_is_told_to_the_step_that_takes_the_batch():
    source = Source(fails_at=1)

    async def train():
        batches = source.ahead()
        await batches.take(0, 10.0)
        await asyncio.sleep(1.0)
        with pytest.raises(FilterStallError, match="all were filtered"):
            await batches.take(1, 10.0)

    run_virtually(train())


def test_another_step_than_the_next_is_asked_for_anew():
    source = Source()

    async def train():
        batches = source.ahead()
        await batches.take(0, 10.0)
        assert await batches.take(5, 10.0) == "batch 5"
        await asyncio.sleep(0)
        batches.close()

    run_virtually(train())
    assert [step for step, *_ in source.asked][-1] == 6 and 5 in [step for step, *_ in source.asked]


def test_closing_leaves_no_task_and_asks_for_nothing_more():
    source = Source(every_s=1000.0)

    async def train():
        before = asyncio.all_tasks()
        batches = source.ahead()
        await batches.take(0, 10000.0)
        await asyncio.sleep(0)
        batches.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        await batches.take(1, 10000.0)
        assert asyncio.all_tasks() == before

    run_virtually(train())
