import asyncio
import threading
import time

from forge_async.core.loop_watch import LoopWatch


def is_watching():
    return any(thread.name == "loop watch" for thread in threading.enumerate())


def ends_soon():
    """Whether the watching thread ends within some seconds."""
    deadline = time.monotonic() + 5
    while is_watching() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_watching()


def hog(released):
    """Blocks the thread it runs on."""
    released.wait(10)


async def test_a_blocked_loop_is_noticed_and_the_culprit_shown():
    told, blocked, released = [], threading.Event(), threading.Event()

    def warn(text):
        told.append(text)
        blocked.set()
        released.set()

    watch = LoopWatch("the test", warn, blocked_after_s=0.05, ask_every_s=0.01).start()
    await asyncio.sleep(0.03)
    assert told == [], "a loop that answers is left alone"
    hog(released)
    assert blocked.is_set()
    assert told[0].startswith("The event loop of the test has been blocked for 0.")
    assert "in hog\n" in told[0]
    async with asyncio.timeout(5):
        while len(told) < 2:  # noqa: ASYNC110  a thread fills it
            await asyncio.sleep(0.01)
    assert told[1].startswith("The event loop of the test runs again, after ")
    watch.close()


async def test_a_watch_that_is_closed_ends_its_thread():
    watch = LoopWatch("the test", print, ask_every_s=0.01).start()
    assert is_watching()
    watch.close()
    assert ends_soon()


def test_a_watch_ends_with_its_loop():
    async def start():
        LoopWatch("the test", print, ask_every_s=0.01).start()
        assert is_watching()

    asyncio.run(start())
    assert ends_soon()
