"""Whoever dies while a run is being started ends the start by name, at once."""

from __future__ import annotations

import asyncio

import pytest

from forge_async.core.errors import ActorDiedError, ConfigError
from forge_async.runtime.start_watch import watched_start

pytestmark = pytest.mark.timeout(20)


class Process:
    def __init__(self, name: str) -> None:
        self.name, self.killed, self.watched = name, asyncio.Event(), asyncio.Event()

    async def wait_for_death(self) -> ActorDiedError:
        self.watched.set()
        await self.killed.wait()
        return ActorDiedError(f"{self.name} was killed.")


async def test_what_starts_is_returned_and_nobody_watches_any_more() -> None:
    store = Process("store")

    async def start(watch) -> str:
        watch(store.wait_for_death)
        await store.watched.wait()
        return "all are there"

    assert await watched_start(start) == "all are there"
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_death_ends_the_start_while_another_process_still_starts() -> None:
    store, ended = Process("store"), []

    async def start(watch) -> None:
        watch(store.wait_for_death)
        store.killed.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("policy")

    with pytest.raises(ActorDiedError, match=r"^store was killed\.$"):
        await asyncio.wait_for(watched_start(start), 5)
    assert ended == ["policy"], "it is waited for"


async def test_the_death_is_told_and_not_what_a_call_on_the_dead_made_of_it() -> None:
    store = Process("store")

    async def start(watch) -> None:
        watch(store.wait_for_death)
        asyncio.get_running_loop().call_later(0.02, store.killed.set)
        raise ConnectionResetError("channel 7 is gone")

    with pytest.raises(ActorDiedError, match="store was killed") as caught:
        await watched_start(start, notice_s=5)
    assert isinstance(caught.value.__cause__, ConnectionResetError)


@pytest.mark.parametrize("num_watched", [0, 1])
async def test_a_start_that_fails_by_itself_says_so(num_watched: int) -> None:
    store = Process("store")

    async def start(watch) -> None:
        for _ in range(num_watched):
            watch(store.wait_for_death)
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        await watched_start(start, notice_s=0.01)


async def test_an_interrupted_start_ends_what_it_began() -> None:
    begun, ended = asyncio.Event(), []

    async def start(watch) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("policy")

    task = asyncio.ensure_future(watched_start(start))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["policy"]
