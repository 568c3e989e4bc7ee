import asyncio
import dataclasses

import pytest

from forge_async.core.errors import DeltaError, PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.publish import Publisher
from tests.fakes import FakeLearnerMesh, FakeReplay, FakeReplica, make_pull


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


async def reading_of_version_0(publisher):
    """A pull that has begun, and what lets it end."""
    replica, release = FakeReplica("policy_0"), asyncio.Event()

    async def slow(version):
        await release.wait()

    replica.pull = slow
    reading = asyncio.create_task(publisher.pull(replica, PolicyVersion(step=0)))
    await asyncio.sleep(0)
    return reading, release


async def test_old_versions_are_retired_but_not_while_they_are_read():
    _, learner, publisher = parts()
    await publish_next(learner, publisher)
    reading, release = await reading_of_version_0(publisher)
    await publish_next(learner, publisher)
    await publish_next(learner, publisher)
    assert [version.step for version in learner.retired] == [1]
    release.set()
    await reading
    await publish_next(learner, publisher)
    assert [version.step for version in learner.retired] == [1, 2]
    assert [version.step for version in learner.retired_with_commit] == [0]
    assert [version.step for version in learner.store] == [3]


async def test_what_the_next_version_supersedes_goes_with_its_commit_and_takes_no_call_of_its_own():
    _, learner, publisher = parts(keep=2)
    for _ in range(5):
        await publish_next(learner, publisher)
    assert [version.step for version in learner.retired_with_commit] == [0, 1, 2]
    assert learner.retired == []
    assert [version.step for version in learner.store] == [3, 4]


async def test_what_is_read_when_the_next_version_comes_stays_and_goes_later():
    _, learner, publisher = parts(keep=2)
    for _ in range(2):
        await publish_next(learner, publisher)
    reading, release = await reading_of_version_0(publisher)
    commit = learner.commit

    async def commit_while_the_reading_ends(version, retire):
        committed = await commit(version, retire)
        release.set()
        await reading
        return committed

    await publish_next(learner, publisher)
    assert [version.step for version in learner.store] == [0, 1, 2], "it is read"
    learner.commit = commit_while_the_reading_ends
    await publish_next(learner, publisher)
    assert [version.step for version in learner.retired_with_commit] == [1]
    assert [version.step for version in learner.retired] == [0], "nobody reads it any more when the version is out"
    assert [version.step for version in learner.store] == [2, 3]


async def test_who_asks_for_a_version_that_goes_with_the_commit_under_way_is_given_a_newer_one():
    _, learner, publisher = parts(keep=2)
    for _ in range(2):
        await publish_next(learner, publisher)
    stage, pulled = learner.stage, []

    async def stage_beside_a_pull(version):
        pulled.append(await publisher.pull(FakeReplica("policy_0", learner), PolicyVersion(step=0)))
        await stage(version)

    learner.stage = stage_beside_a_pull
    await publish_next(learner, publisher)
    assert [pull.version.step for pull in pulled] == [1]
    assert [version.step for version in learner.store] == [1, 2]


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


async def test_what_a_delta_is_built_on_stays_and_its_share_of_changes_is_told():
    _, learner, publisher = parts()
    learner.deltas = True
    told = [await publish_next(learner, publisher) for _ in range(3)]
    assert [publication.changed_fraction for publication in told] == [None, 0.25, 0.25]
    assert [publication.num_bytes for publication in told] == [8, 2, 2]
    assert [version.step for version in learner.store] == [0, 2], "the second delta needs the whole version too"


async def test_a_delta_that_comes_finds_all_that_it_may_be_built_on():
    _, learner, publisher = parts(keep=2)
    learner.deltas = True
    for _ in range(4):
        await publish_next(learner, publisher)
    assert [version.step for version in learner.store] == [0, 2, 3]
    assert [version.step for version in learner.retired_with_commit] == [1]


class ReplicaWithoutDeltas(FakeReplica):
    """Its first pull of each version of `broken` finds a damaged delta."""

    def __init__(self, name, learner, broken):
        super().__init__(name, learner)
        self.broken, self.pulls = broken, []

    async def pull(self, version):
        self.pulls.append(version.step)
        if version.step in self.broken and version not in self._learner.restaged:
            raise DeltaError(f"{version} cannot be rebuilt.")
        return await super().pull(version)


async def test_a_damaged_delta_is_replaced_by_the_newest_version_published_whole_once_for_all_replicas():
    _, learner, publisher = parts(keep=4)
    learner.deltas = True
    for _ in range(3):
        await publish_next(learner, publisher)
    replicas = [ReplicaWithoutDeltas(f"policy_{number}", learner, broken=(1, 2)) for number in range(2)]
    pulls = await asyncio.gather(*(publisher.pull(replica, PolicyVersion(step=1)) for replica in replicas))
    assert [pull.version.step for pull in pulls] == [2, 2]
    assert all("policy@0.1 cannot be rebuilt" in pull.damage for pull in pulls)
    assert learner.restaged == [PolicyVersion(step=2)]
    assert [replica.pulls for replica in replicas] == [[1, 2], [1, 2]]
    again = await publisher.pull(replicas[0], PolicyVersion(step=2))
    assert again == dataclasses.replace(make_pull(PolicyVersion(step=2)), damage="")
