"""A request service on a fake engine whose steps the test can hold back."""

import asyncio
import contextlib
import threading

import numpy as np

from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.policy.service import RequestService
from tests.fakes import FakeEngine


def request(id, *, max_new_tokens=5, num_samples=2, seed=0, stop=()):
    return GenerationRequest(
        id=str(id),
        prompt_token_ids=np.array([1, 4, 5], dtype=np.int32),
        num_samples=num_samples,
        seed=seed,
        sampling=Sampling(max_new_tokens=max_new_tokens, stop_token_ids=tuple(stop)),
    )


class GatedEngine(FakeEngine):
    """Each step waits until the test lets it, so that the test owns the order of events."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.entered = threading.Event()

    def step(self):
        self.entered.set()
        assert self.gate.acquire(timeout=10)
        return super().step()

    def let(self, num_steps):
        self.gate.release(num_steps)


@contextlib.asynccontextmanager
async def serving(engine, **options):
    service = RequestService(lambda: engine, **options)
    await service.start()
    before = asyncio.all_tasks()
    try:
        yield service
    finally:
        if isinstance(engine, GatedEngine):
            engine.let(1000)
        await service.close()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - before
        assert not left, left


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def calls(engine, name):
    return [value for call, value in engine.log if call == name]


def added(engine):
    """The requests that entered the engine, by their senders' names, in order."""
    return [id.split("~")[0] for id in calls(engine, "add")]
