import asyncio

import pytest

from forge_async.core.errors import PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.publish import Publisher
from tests.fakes import FakeLearnerMesh, FakeReplay, FakeReplica


def parts(keep=1):
    replay = FakeReplay(1, 0)
    learner = FakeLearnerMesh(replay)
    return replay, learner, Publisher(learner, replay, keep)


async def publish_next(learner, publisher):
    publication = await publisher.publish(await learner.snapshot())
    learner.version = learner.version.next()
    return publication


async def test_a_publication_is_staged_committed_and_told_to_replay():
    replay, learner, publisher = parts()
    publication = await publish_next(learner, publisher)
    assert publication.version == PolicyVersion()
    assert publication.num_bytes == 8
    assert publication.duration_s >= 0
    assert learner.store == [PolicyVersion()]
    assert replay.published_steps == [0]


async def test_old_versions_are_retired_but_not_while_they_are_read():
    _, learner, publisher = parts()
    await publish_next(learner, publisher)
    replica, release = FakeReplica("policy_0"), asyncio.Event()

    async def slow(version):
        await release.wait()

    replica.pull = slow
    reading = asyncio.create_task(publisher.pull(replica, PolicyVersion(step=0)))
    await asyncio.sleep(0)
    await publish_next(learner, publisher)
    await publish_next(learner, publisher)
    assert [version.step for version in learner.retired] == [1]
    release.set()
    await reading
    await publish_next(learner, publisher)
    assert sorted(version.step for version in learner.retired) == [0, 1, 2]
    assert [version.step for version in learner.store] == [3]


async def test_a_failed_pull_lets_go_of_its_version():
    _, learner, publisher = parts()
    await publish_next(learner, publisher)
    with pytest.raises(PolicyError, match="cannot pull"):
        await publisher.pull(FakeReplica("policy_0", fail_at=0), PolicyVersion(step=0))
    await publish_next(learner, publisher)
    assert [version.step for version in learner.retired] == [0]


async def test_who_waits_for_a_newer_version_gets_the_newest():
    _, learner, publisher = parts(keep=9)
    waiting = [
        asyncio.create_task(publisher.newer_than(seen)) for seen in (None, PolicyVersion(), PolicyVersion(step=1))
    ]
    await asyncio.sleep(0)
    await publish_next(learner, publisher)
    await asyncio.sleep(0.001)
    assert [task.done() for task in waiting] == [True, False, False]
    await publish_next(learner, publisher)
    await asyncio.sleep(0.001)
    assert [task.done() for task in waiting] == [True, True, False]
    await publish_next(learner, publisher)
    assert [(await task).step for task in waiting] == [0, 1, 2]
    assert (await publisher.newer_than(PolicyVersion())).step == 2
