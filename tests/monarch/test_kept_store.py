"""The store of a loop of one's own dies, is replaced, and weights go on travelling."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from forge_async.actors import KeptStore, Service
from forge_async.core.errors import ActorDiedError, ForgeError
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.store_keeper import StoreRestart
from forge_async.weights.settings import WeightsSettings
from tests.monarch.weight_ends import Reader, Writer

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]


async def kill(pid: int, watch) -> None:
    os.kill(pid, signal.SIGKILL)
    await asyncio.wait_for(watch.wait_for_death(), 10)


def fail(restart: StoreRestart) -> None:
    raise ValueError("a user's callback, which is not to stop the others, nor the store")


async def test_a_store_that_dies_is_replaced_and_has_the_newest_version_until_it_may_not_be() -> None:
    store = await KeptStore.start(WeightsSettings(store_restarts=2))
    learner, policy = await asyncio.gather(
        Writer.options(mesh_name="learner").as_actor(store.handle),
        Reader.options(mesh_name="policy", num_replicas=2).as_service(store=store.handle),
    )
    with pytest.raises(ForgeError, match="serves nobody yet"):
        await store.publish(PolicyVersion(step=1))
    told: asyncio.Queue[StoreRestart] = asyncio.Queue()
    store.on_restart += [fail, told.put_nowait]
    assert store.serve(learner, policy) is store
    for step in (1, 2):
        await store.publish(PolicyVersion(step=step))
        assert await store.pull(PolicyVersion(step=step)) == [step, step]

    await kill(store.handle.pids[0], store.handle.watch)
    assert await store.pull(PolicyVersion(step=1)) == [2, 2], "what was lost with it is pulled as the newest"
    restart = await asyncio.wait_for(told.get(), 10)
    assert (restart.number, restart.version) == (1, PolicyVersion(step=2))
    await store.publish(PolicyVersion(step=3))
    assert await store.pull(PolicyVersion(step=3)) == [3, 3]

    handle = policy.handles()[1]
    assert handle is not None
    await kill(handle.pids[0], handle.watch)
    await asyncio.wait_for(policy.wait_for_replica(), 60)
    while policy.handles()[1] is None:
        await policy._changed.wait()
    assert await policy.versions.to(1) == [2, 3], "a replica that is respawned joins the store that is there"

    # It dies under whatever a publication is at.
    publishing = asyncio.ensure_future(store.publish(PolicyVersion(step=4)))
    os.kill(store.handle.pids[0], signal.SIGKILL)
    await asyncio.wait_for(publishing, 60)
    assert await store.pull(PolicyVersion(step=4)) == [4, 4]

    await kill(store.handle.pids[0], store.handle.watch)
    for way in (store.publish, store.pull):
        with pytest.raises(ActorDiedError, match=r"^store .*SIGKILL.* weights\.store_restarts=2 are used up\.$"):
            await asyncio.wait_for(way(PolicyVersion(step=5)), 60)
    await store.shutdown()
    await policy.shutdown()
    await learner.shutdown()


async def test_a_store_that_was_shut_down_is_not_replaced() -> None:
    store = await KeptStore.start(WeightsSettings())
    nobody = Service(Reader.options(mesh_name="policy"), (), {})
    pid = store.serve(store.handle, nobody).handle.pids[0]
    with pytest.raises(ForgeError, match=r"^store serves others already; start another KeptStore for these\.$"):
        store.serve(store.handle, nobody)
    await store.shutdown()
    with pytest.raises(ActorDiedError, match=r"^store was shut down\.$"):
        await store.publish(PolicyVersion(step=1))
    assert store.handle.pids == [pid]
