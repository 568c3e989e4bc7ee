"""Work on a thread is over when its caller goes on, whatever happens to the caller."""

import asyncio
import threading

import pytest

from forge_async.core.threads import to_thread_and_back

pytestmark = pytest.mark.timeout(20)


async def test_it_returns_and_raises_what_the_work_does():
    def divide(a, *, by):
        return a / by

    assert await to_thread_and_back(divide, 6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await to_thread_and_back(divide, 6, by=0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("num_times", [1, 3])
async def test_a_caller_that_is_cancelled_goes_on_when_the_work_has_ended(num_times, fails):
    begun, may_end, ended = threading.Event(), threading.Event(), []

    def work():
        begun.set()
        assert may_end.wait(10)
        ended.append(True)
        if fails:
            raise OSError("nobody hears of this")

    task = asyncio.ensure_future(to_thread_and_back(work))
    assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(num_times):
        task.cancel()
        await asyncio.wait({task}, timeout=0.02)
        assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_deadline_that_passes_meanwhile_is_told_when_the_work_has_ended():
    passed, ended = threading.Event(), []

    def work():
        assert passed.wait(10)
        ended.append(True)

    asyncio.get_running_loop().call_later(0.05, passed.set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await to_thread_and_back(work)
    assert ended == [True]
