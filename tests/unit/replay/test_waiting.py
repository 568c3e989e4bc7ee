"""`WaitingReplay`: who waits is woken by what it waits for, and no wait is endless."""

import asyncio

import pytest

from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.core.errors import StallError
from forge_async.replay.admission import Prompts
from forge_async.replay.settings import AsyncSettings
from forge_async.replay.state import ReplayState
from forge_async.replay.waiting import WaitingReplay
from tests.strategies import make_group


def replay(*, groups_per_step=2, num_steps=None, patience_s=100.0, **dials):
    state = ReplayState(
        settings=AsyncSettings(**dials),
        groups_per_step=groups_per_step,
        prompts=Prompts(source="s", epoch_size=100),
        tokens_guess=10,
        num_steps=num_steps,
    )
    return WaitingReplay(state, LoopClock(), patience_s)


async def make(replay, admissions, step=0):
    await replay.put([make_group(one.index, one.prompt_id, [[step]]) for one in admissions])


async def step(replay, number, replica="r"):
    """One step with what is ready, published and pulled."""
    await replay.take(number)
    await replay.trained(number)
    await replay.published(number + 1)
    await replay.pulled(replica, number + 1)


def test_room_and_batches_are_waited_for_until_they_are_there():
    async def scenario():
        one = replay(max_staleness=1)
        await one.add_replica("r", 0)
        first, second = await one.admit("r", 2), await one.admit("r", 2)
        third = asyncio.create_task(one.admit("r", 2))
        batch = asyncio.create_task(one.take(0))
        await asyncio.sleep(1.0)
        assert not third.done(), "depth is used up"
        assert not batch.done()
        await make(one, second)
        await make(one, first)
        assert [group.index for group in await batch] == [0, 1]
        await asyncio.sleep(1.0)
        assert not third.done(), "taking frees no room before the replica has pulled"
        await step(one, 0)
        assert [admission.index for admission in await third] == [4, 5]

    run_virtually(scenario())


@pytest.mark.parametrize("deadline_s", [None, 7.0])
def test_a_wait_ends_at_its_deadline_with_the_reason(deadline_s):
    async def scenario():
        one, loop = replay(max_staleness=0, patience_s=100.0), asyncio.get_running_loop()
        await one.add_replica("r", 0)
        await one.admit("r", 2)
        begun = loop.time()
        with pytest.raises(StallError, match="given no group for .* the round in progress must end first"):
            await one.admit("r", 2, deadline_s)
        assert loop.time() - begun == pytest.approx(deadline_s or 100.0)
        with pytest.raises(StallError, match="waited .* for a batch: step 0 needs 2 groups: 0 are ready, 2 in flight"):
            await one.take(0, deadline_s)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "no alarm outlives its wait"

    run_virtually(scenario())


def test_changes_do_not_move_the_deadline():
    async def scenario():
        one, loop = replay(max_staleness=4), asyncio.get_running_loop()
        await one.add_replica("r", 0)

        async def change():
            for _ in range(10):
                await asyncio.sleep(3.0)
                await one.admit("r", 1)

        changing, begun = asyncio.create_task(change()), loop.time()
        with pytest.raises(StallError):
            await one.take(0, 10.0)
        assert loop.time() - begun == pytest.approx(10.0)
        await changing

    run_virtually(scenario())


def test_a_patience_that_ended_without_a_reason_begins_anew():
    async def scenario():
        one = replay(max_staleness=0, num_steps=1)
        await one.add_replica("r", 0)
        first, second = await one.admit("r", 2)
        await make(one, [first])
        waiting = asyncio.create_task(one.admit("r", 2, 5.0))
        await asyncio.sleep(12.0)
        await one.end(second.index, "filtered", "zero_variance", second.attempt)
        assert [admission.index for admission in await waiting] == [2]

    run_virtually(scenario())


def test_nobody_is_hurried_when_the_steps_to_come_need_no_more_groups():
    async def scenario():
        one = replay(max_staleness=1, num_steps=1)
        await one.add_replica("r", 0)
        await make(one, await one.admit("r", 2))
        waiting = asyncio.create_task(one.admit("r", 2, 5.0))
        await asyncio.sleep(1000.0)
        assert not waiting.done()
        await one.close("the last step is done")
        assert await waiting == []

    run_virtually(scenario())


def test_groups_that_a_take_sends_back_wake_the_replica_that_waits_for_room():
    """The learner finds a group too old (`on_stale=wait`): it waits again, and a replica must hear of it."""

    async def scenario():
        one = replay(max_staleness=0, groups_per_step=1)
        await one.add_replica("r", 0)
        await make(one, await one.admit("r", 1))
        await step(one, 0)
        (late,) = await one.admit("r", 1)
        waiting = asyncio.create_task(one.admit("r", 1))
        await make(one, [late], step=0)
        batch = asyncio.create_task(one.take(1))
        assert [admission.index for admission in await waiting] == [late.index]
        await make(one, [late], step=1)
        assert [group.oldest_step() for group in await batch] == [1]

    run_virtually(scenario())


def test_a_dead_replica_s_groups_wake_the_others():
    async def scenario():
        one = replay(max_staleness=1, groups_per_step=1)
        for name in ("a", "b"):
            await one.add_replica(name, 0)
        lost, _ = await one.admit("a", 9), await one.admit("b", 9)
        waiting = asyncio.create_task(one.admit("b", 9))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await one.remove_replica("a")
        assert [admission.index for admission in await waiting] == [admission.index for admission in lost]

    run_virtually(scenario())


def test_who_asks_first_leaves_the_others_their_share():
    async def scenario():
        one = replay(max_staleness=1, groups_per_step=4)
        for name in ("a", "b"):
            await one.add_replica(name, 0)
        first = await one.admit("a", 9)
        assert [admission.index for admission in first] == [0, 1, 2, 3], "half of the depth of 8"
        again = asyncio.create_task(one.admit("a", 9))
        await asyncio.sleep(1.0)
        assert not again.done()
        assert [admission.index for admission in await one.admit("b", 1)] == [4], "b takes its time"
        await make(one, first[:2])
        assert [admission.index for admission in await again] == [5, 6, 7], "only a has made groups: 3/4 of 6 are its"

    run_virtually(scenario())


def test_nothing_is_kept_for_a_replica_that_is_two_versions_behind():
    async def scenario():
        one = replay(max_staleness=1, groups_per_step=4)
        for name in ("a", "hung"):
            await one.add_replica(name, 0)
        for number in range(2):
            while len(one.inner.ledger.ready) < 4:
                given = await one.admit("a", 9)
                await make(one, given, step=number)
            await step(one, number, replica="a")
        assert len(await one.admit("a", 9)) == 4 - len(one.inner.ledger.ready) + 4

    run_virtually(scenario())


def test_a_wait_that_is_cancelled_leaves_nothing_behind():
    async def scenario():
        one = replay(max_staleness=0)
        await one.add_replica("r", 0)
        waiting = asyncio.create_task(one.take(0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    run_virtually(scenario())
