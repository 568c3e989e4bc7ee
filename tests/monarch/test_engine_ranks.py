"""An engine on two tensor-parallel ranks that its replica owns: what they pull, and what a death of one does."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from forge_async.actors.policy_actor import PolicyActor
from forge_async.actors.store_actor import StoreActor
from forge_async.core.errors import ForgeError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.policy.settings import PolicySettings
from forge_async.weights.packing import Packer
from forge_async.weights.settings import WeightsSettings
from tests.engines import PROMPT, request
from tests.models import Reference, make_model, read_weights, without_end
from tests.ranks import halves

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(500)]
NAME = "policy_0"
SETTINGS = PolicySettings(
    tensor_parallel=2, max_model_tokens=128, max_sequences=64, max_batch_tokens=1024, kv_cache_bytes=4 << 20
)
FULL = WeightsSettings(transport="shm", verify="full", delta="never")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models, whose vocabulary two ranks cannot share evenly, with a head of keys for each rank."""
    return [without_end(make_model(tmp_path_factory.mktemp(f"m{seed}"), "qwen3_wide", seed)) for seed in (0, 1)]


async def publish(plane, weights, step, kind="full"):
    version = PolicyVersion(step=step)
    for rank, shards in enumerate(halves(weights)):
        await plane.stage(version, *Packer(rank).pack(shards))
    assert (await plane.commit(version, 2)).kind == kind
    return version


async def start_policy(folders, settings=FULL):
    from forge_async.backends.weight_stores import open_writing_plane

    store = await StoreActor.options(mesh_name="store").as_actor(settings)
    handle = await store.handle.call_one()
    options = PolicyActor.options(mesh_name=NAME, start_timeout_s=450)
    policy = await options.as_actor(NAME, str(folders[0]), SETTINGS, settings, swap="keep_kv")
    await policy.connect.call_one(handle)
    return policy, await policy.ranks.call_one(), open_writing_plane(handle)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def assert_gone(pids, within_s):
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        await asyncio.sleep(0.05)


async def test_ranks_serve_what_was_published_and_end_with_the_first_that_dies(folders):
    policy, ranks, plane = await start_policy(folders)
    pids = [*policy.pids, *ranks.pids]
    assert len(set(pids)) == 3 and all(map(is_running, pids))
    for step, folder in enumerate([*folders, folders[0]]):
        pull = await assert_serves(policy, await publish(plane, read_weights(folder), step), Reference(folder))
        assert pull.held_bytes == 0, "each rank copies out of the store's memory"
    other = {name: tensor.double() for name, tensor in read_weights(folders[1]).items()}
    with pytest.raises(WeightsError, match="the engine holds float32"):
        await policy.pull.call_one(await publish(plane, other, step=3))
    served, scored = await policy.score.call_one(np.array(PROMPT, dtype=np.int32))
    assert served.step == 2 and scored == pytest.approx(Reference(folders[0]).logprobs(PROMPT), abs=1e-4)

    waiting = asyncio.ensure_future(policy.generate.call_one([request("a", n=16, tokens=120)]))
    dying = asyncio.ensure_future(ranks.watch.wait_for_death())
    await asyncio.sleep(0.3)
    begun = time.monotonic()
    os.kill(ranks.pids[1], signal.SIGKILL)
    with pytest.raises(ForgeError, match=rf"{NAME}.*(pid {ranks.pids[1]}|pid {policy.pids[0]})"):
        await asyncio.wait_for(waiting, 5)
    death = await asyncio.wait_for(dying, 5)
    assert f"pid {ranks.pids[1]}" in str(death) and "SIGKILL" in str(death)
    await asyncio.wait_for(policy.watch.wait_for_death(), 5)
    assert time.monotonic() - begun < 5
    await assert_gone(pids, within_s=5)


async def test_ranks_put_a_version_together_from_deltas(folders, tmp_path):
    near = tmp_path / "near"
    shutil.copytree(folders[0], near)
    weights = read_weights(near)
    weights["model.norm.weight"] *= 1.5
    save_file(weights, near / "model.safetensors", {"format": "pt"})
    policy, _, plane = await start_policy(folders, dataclasses.replace(FULL, delta="always"))
    try:
        for step, folder in enumerate([folders[0], near, folders[0], near]):
            version = await publish(plane, read_weights(folder), step, "delta" if step else "full")
            if step != 2:  # one is missed: the next is reached over both deltas
                await assert_serves(policy, version, Reference(folder))
    finally:
        await policy.shutdown()


async def assert_serves(policy, version, reference):
    pull = await policy.pull.call_one(version)
    assert pull.version == version
    served, scored = await policy.score.call_one(np.array(PROMPT, dtype=np.int32))
    assert served == version
    assert scored == pytest.approx(reference.logprobs(PROMPT), abs=1e-4)
    [result] = await policy.generate.call_one([request(n=4, tokens=24)])
    for tokens, logprobs in zip(result.completions.rows(), np.split(result.completions.logprobs, 4), strict=True):
        expected = reference.logprobs([*PROMPT, *tokens.tolist()])[len(PROMPT) - 1 :]
        assert logprobs == pytest.approx(expected, abs=1e-4)
    return pull


async def test_ranks_end_with_their_replica(folders):
    policy, ranks, _ = await start_policy(folders)
    os.kill(policy.pids[0], signal.SIGKILL)
    await assert_gone([*policy.pids, *ranks.pids], within_s=5)
