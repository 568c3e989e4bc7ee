"""What start-up leaves behind is not walked by the garbage collector in every process of a run."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_async.actors import ForgeActor, endpoint
from forge_async.runtime.launch import Launch

pytestmark = [pytest.mark.stack, pytest.mark.timeout(40)]


class Thing:
    """Something that may refer to itself."""


class Loader(ForgeActor):
    """Its setup loads something for good, and leaves a dead cycle behind."""

    async def setup(self) -> None:
        self.loaded, dead = Thing(), Thing()
        dead.itself = dead  # pyright: ignore[reportAttributeAccessIssue]
        self.dead = weakref.ref(dead)

    @endpoint
    async def heap(self) -> tuple[bool, bool, bool]:
        """Whether what was loaded is walked, whether what is new is, and whether the dead cycle is still there."""
        new = Thing()
        walked = gc.get_objects()
        return any(each is self.loaded for each in walked), any(each is new for each in walked), bool(self.dead())


async def test_what_an_actors_setup_loaded_is_left_alone_by_the_collector() -> None:
    actor = await Loader.options(procs=2).as_actor()
    try:
        assert await actor.heap.call() == [(False, True, False)] * 2
    finally:
        await actor.shutdown()


class FakeRun:
    """Notes what the collector walks when the ring begins."""

    result = None

    def __init__(self) -> None:
        self.loaded, self.walked = Thing(), list[bool]()

    async def keep_store(self) -> None:
        pass

    async def prepare(self) -> None:
        self.walked.append(any(each is self.loaded for each in gc.get_objects()))

    async def train(self, version: None) -> None:
        self.walked.append(any(each is self.loaded for each in gc.get_objects()))


async def test_what_the_controller_loaded_is_left_alone_when_the_ring_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun()
    launch = Launch(*cast(Any, (None, None, None, SimpleNamespace(phase=lambda *_: None))), begun_s=0.0)
    # The real one needs a whole run's actors; what is looked at is when it is told to begin.
    monkeypatch.setattr(launch, "_build_run", lambda *_: run)
    try:
        await launch._train(cast(Any, SimpleNamespace(handles=())))
    finally:
        gc.unfreeze()
    assert run.walked == [True, False]
