"""Proof that weights arrive: after each publication every replica's probe equals the learner's (Laws 4 and 5)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from forge_async.actors.forge_actor import ActorHandle
from forge_async.config import compose
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.publish import Publisher
from forge_async.rollout.demonstrations import demonstration_samples
from forge_async.runtime.meshes import Placement
from forge_async.runtime.wiring import start_actors
from tests.engines import request

pytestmark = [pytest.mark.stack, pytest.mark.timeout(200)]

PROBE = np.array([1, 20, 13, 25, 31, 19, 2], dtype=np.int32)
"""Some sum with its answer, in the character tokenizer's ids."""


class NoReplay:
    """Stands in for the replay actor, which has no part in this."""

    async def published(self, step: int) -> None:
        pass


async def test_every_replica_serves_the_learners_weights_and_they_change_with_each_step(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = [f"model.path={tiny_model}", "learner.ranks=2", "policy.replicas=2", "optimizer.lr=0.01",
             "optimizer.warmup_steps=0", "task.name=sum", "async.swap=blocking"]  # fmt: skip
    config = compose(overrides=words)
    async with await Placement.start(config.job, tmp_path) as placement:
        actors = await start_actors(config, tiny_model, placement, tmp_path, lambda *_: None)
        publisher = Publisher(actors.learner, NoReplay(), keep_versions=2)  # pyright: ignore[reportArgumentType]
        lesson = demonstration_samples([PROBE[:5]] * 4, [PROBE[5:]] * 4)
        learner, before = actors.handles[0], None
        for step in range(3):
            version = await actors.learner.snapshot()
            assert version.step == step
            await publisher.publish(version)
            ours = (await actors.learner.score([PROBE]))[0]
            for replica in actors.replicas:
                pull = await publisher.pull(replica, version)
                served, theirs = await replica.score(PROBE)
                assert served == pull.version == version
                assert pull.swap is not None and pull.swap.mode == "blocking"
                assert pull.pause_s == pull.swap.pause_s > 0
                np.testing.assert_allclose(theirs, ours, atol=1e-4, rtol=0)
            if before is not None:
                assert np.abs(ours - before).max() > 1e-2, "the probe moved, so equality proves something"
            before = ours
            await learner.train.call(lesson)
        late = await actors.replicas[0].pull(PolicyVersion(step=1))
        assert (late.version.step, late.num_bytes, late.swap) == (2, 0, None), "superseded: weights never go back"
        assert (await actors.replicas[0].score(PROBE))[0].step == 2
        await assert_a_cut_ends_a_ticket(actors.handles[1])


async def test_deltas_arrive_with_equal_fingerprints_and_a_damaged_one_is_replaced_by_a_whole_version(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = [f"model.path={tiny_model}", "learner.ranks=2", "optimizer.lr=0.001", "optimizer.warmup_steps=0",
             "task.name=sum", "policy.dtype=bfloat16", "weights.delta=always", "weights.verify=full"]  # fmt: skip
    config = compose(overrides=words)
    async with await Placement.start(config.job, tmp_path) as placement:
        actors = await start_actors(config, tiny_model, placement, tmp_path, lambda *_: None)
        publisher = Publisher(actors.learner, NoReplay(), keep_versions=2)  # pyright: ignore[reportArgumentType]
        lesson = demonstration_samples([PROBE[:5]] * 4, [PROBE[5:]] * 4)
        learner, store, [replica] = actors.handles[0], actors.store.handle, actors.replicas
        publications, pulls = [], []
        for step in range(5):
            version = await actors.learner.snapshot()
            publications.append(await publisher.publish(version))
            if step == 3:
                await damage(store, f"{version}/delta/1")
            pulls.append(await publisher.pull(replica, version))  # which compares every parameter, or raises
            assert (await replica.score(PROBE))[0] == pulls[-1].version == version
            await learner.train.call(lesson)
    whole = publications[0].num_bytes
    assert publications[0].changed_fraction is None
    assert all(0 < (publication.changed_fraction or 0) < 1 for publication in publications[1:])
    assert all(publication.num_bytes < whole / 2 for publication in publications[1:])
    assert [pull.num_bytes < whole / 2 for pull in pulls] == [False, True, True, False, True]
    assert [bool(pull.damage) for pull in pulls] == [False, False, False, True, False]
    assert "bucket 0 of a delta is damaged" in pulls[3].damage


async def damage(store: ActorHandle, key: str) -> None:
    """Flip a bit of what the store holds."""
    from forge_async.backends.weight_stores import open_store

    client = open_store(await store.handle.call_one())
    async with client.reading([key]) as [value]:
        damaged = value.clone()
    damaged[-1] ^= 1
    await client.put({key: damaged})
    await client.close()


async def assert_a_cut_ends_a_ticket(policy: ActorHandle) -> None:
    """The replica gives back what it has made by then, whichever comes first; the ticket is closed."""
    submitting = policy.submit.call_one("mine", [request("a", n=4, tokens=50)], 0.0)
    (late, done), cut = await asyncio.gather(submitting, policy.cut.call_one("mine"))
    assert [(result.id, len(result.completions.cut)) for result in late + cut] == [("a", 4)] and done
    assert await policy.cut.call_one("other") == []
    (result,), done = await policy.submit.call_one("other", [request("a", n=4, tokens=50)], 0.0)
    assert result.completions.cut.all() and done
    stats = await policy.stats.call_one()
    assert [record.mode for record in stats.service.swap_records] == ["blocking"] * 3
    assert (stats.limit_sequences, stats.num_queued, stats.num_running) == (0, 0, 0)
