import asyncio

import pytest

from forge_async.core.errors import NonFiniteError, PolicyError, unwrap
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.publish import Publisher
from forge_async.pipeline.ring import Ring, RingSettings
from tests.fakes import FakeLearnerMesh, FakeReplay, FakeReplica, FakeWorkers

pytestmark = pytest.mark.timeout(30)


class Notes:
    """An Observer that keeps what it is told."""

    def __init__(self):
        self.told = []

    def admitted(self, admissions, replica):
        self.told += [("admitted", admission.index) for admission in admissions]

    def made(self, records):
        self.told += [("made", record.index) for record in records]

    def stepped(self, step, ranks):
        self.told.append(("stepped", step))

    def published(self, publication):
        self.told.append(("published", publication.version.step))

    def pulled(self, replica, pull):
        self.told.append((f"{replica} pulled", pull.version.step))

    def of(self, name):
        return [value for told, value in self.told if told == name]


class Through:
    """The same object with some methods replaced for whoever holds this one."""

    def __init__(self, inner, **methods):
        self.__dict__.update(methods, _inner=inner)

    def __getattr__(self, name):
        return getattr(self._inner, name)


class World:
    """A ring over fakes, ready to run."""

    def __init__(
        self, *, num_steps=6, groups_per_step=4, max_staleness=0, num_replicas=1, publish_every=1, keep=1,
        learner_fails_at=None, worker_fails_at=None, pull_fails_at=None, after_step=None, version=None,
    ):  # fmt: skip
        self.replay = FakeReplay(groups_per_step, max_staleness, version.step if version else 0)
        self.learner = FakeLearnerMesh(self.replay, learner_fails_at, version)
        names = [f"policy_{i}" for i in range(num_replicas)]
        self.replicas = [FakeReplica(name, self.learner, pull_fails_at) for name in names]
        self.workers = FakeWorkers(self.replay, self.replicas, worker_fails_at)
        self.publisher = Publisher(self.learner, self.replay, keep)
        self.notes = Notes()
        self.ring = Ring(
            replay=self.replay,
            learner=self.learner,
            replicas=self.replicas,
            workers=self.workers,
            publisher=self.publisher,
            observer=self.notes,
            settings=RingSettings(num_steps=num_steps, groups_per_step=groups_per_step, publish_every=publish_every),
            after_step=after_step,
        )

    async def run(self):
        version = await self.learner.snapshot()
        await self.publisher.publish(version)
        for replica in self.replicas:
            await self.publisher.pull(replica, version)
            await self.replay.add_replica(replica.name, version.step)
        before = asyncio.all_tasks()
        try:
            async with asyncio.timeout(20):
                return await self.ring.run(version)
        finally:
            assert asyncio.all_tasks() == before, "a loop outlived the ring"


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_every_step_gets_its_batch_and_every_replica_the_last_version(max_staleness, num_replicas):
    world = World(max_staleness=max_staleness, num_replicas=num_replicas)
    last = await world.run()
    assert last == PolicyVersion(step=6)
    assert world.replay.taken == {step: list(range(4 * step, 4 * step + 4)) for step in range(6)}
    assert world.replay.trained_steps == world.notes.of("stepped") == list(range(6))
    assert {replica.version.step for replica in world.replicas} == {6}
    assert max(world.replay.staleness) <= max_staleness
    assert world.notes.of("admitted") == sorted(world.notes.of("admitted"))
    assert sorted(world.notes.of("made")) == sorted(world.workers.made)


async def test_a_ring_that_goes_on_does_the_steps_that_are_left():
    done = []

    async def after(steps):
        done.append(steps)

    world = World(
        num_steps=7, publish_every=2, max_staleness=1, after_step=after, version=PolicyVersion(incarnation=2, step=3)
    )
    assert await world.run() == PolicyVersion(incarnation=2, step=7)
    assert world.notes.of("stepped") == [3, 4, 5, 6]
    assert done == [4, 5, 6, 7]
    assert world.notes.of("published") == [4, 6, 7], "as if it had never stopped"


async def test_at_staleness_two_generation_runs_ahead_of_training():
    world = World(max_staleness=2)
    await world.run()
    told = world.notes.told
    assert max(world.replay.staleness) == 2
    assert told.index(("admitted", 8)) < told.index(("stepped", 0))
    assert world.notes.of("published") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("num_steps", [5, 6])
async def test_publishing_every_second_step_still_publishes_the_last(num_steps):
    world = World(max_staleness=1, publish_every=2, num_steps=num_steps)
    await world.run()
    assert world.notes.of("published") == ([2, 4, 6] if num_steps == 6 else [2, 4, 5])
    assert max(world.replay.staleness) <= 1
    assert len(world.replay.taken) == num_steps


async def test_versions_that_nobody_reads_are_retired():
    world = World(max_staleness=2, num_replicas=2, keep=2, num_steps=8)
    await world.run()
    assert [version.step for version in world.learner.store][-2:] == [7, 8]
    assert len(world.learner.store) <= 3


async def test_what_comes_after_a_step_delays_the_next_one():
    order = []

    async def after(done):
        await asyncio.sleep(0.005)
        order.append(("after", done, len(world.replay.taken)))

    world = World(num_steps=3, max_staleness=1, after_step=after)
    await world.run()
    assert order == [("after", 1, 1), ("after", 2, 2), ("after", 3, 3)]


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        ({"learner_fails_at": 2}, NonFiniteError, "Step 2: loss=nan"),
        ({"worker_fails_at": 9}, PolicyError, "Group 9 cannot be made"),
        ({"pull_fails_at": 2}, PolicyError, "policy_1 cannot pull"),
    ],
)
@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_loop_that_fails_ends_the_others_and_is_the_cause(failure, error, message, max_staleness):
    world = World(num_replicas=2, max_staleness=max_staleness, **failure)
    if "pull_fails_at" in failure:
        world.replicas[0]._fail_at = None
    with pytest.raises(ExceptionGroup) as caught:
        await world.run()
    cause = unwrap(caught.value)
    assert isinstance(cause, error)
    assert message in str(cause)


async def test_a_failed_publication_is_the_cause():
    world = World(max_staleness=2)

    async def fail(version, retire):
        raise PolicyError("the store is gone")

    world.learner.commit, commit = fail, world.learner.commit
    with pytest.raises(PolicyError, match="the store is gone"):
        await world.run()
    world.learner.commit = commit
    committed = []

    async def fail_later(version, retire):
        committed.append(version)
        if len(committed) == 3:
            raise PolicyError("the store is gone")
        return await commit(version, retire)

    world = World(max_staleness=2)
    world.learner.commit, commit = fail_later, world.learner.commit
    with pytest.raises(ExceptionGroup) as caught:
        await world.run()
    assert "the store is gone" in str(unwrap(caught.value))


async def test_a_ring_that_is_cancelled_leaves_nothing_running():
    async def forever(done):
        await asyncio.Event().wait()

    world = World(after_step=forever)
    running = asyncio.create_task(world.run())
    while not world.notes.of("stepped"):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_step_that_is_done_takes_no_call_of_its_own_unless_somebody_asks_for_it():
    world, calls = World(num_steps=5, max_staleness=2, publish_every=2), []
    trained = world.replay.trained

    async def counted(step):
        calls.append(step)
        await trained(step)

    async def after(done):
        if done == 3:
            await world.ring.noted()
            assert world.replay.trained_steps == [0, 1, 2]

    world.ring._replay = Through(world.replay, trained=counted)
    world.ring._after_step = after
    await world.run()
    assert calls == [2]
    assert world.replay.trained_steps == [0, 1, 2, 3, 4], "the learner and the publications tell"


async def test_whoever_asks_hears_when_a_step_is_noted():
    told = []

    async def after(done):
        await world.ring.noted()
        told.append((done, list(world.replay.trained_steps)))

    world = World(num_steps=2, max_staleness=1, after_step=after)
    trained = world.replay.trained

    async def slowly(step):
        for _ in range(20):
            await asyncio.sleep(0)
        await trained(step)

    world.replay.trained = slowly
    await world.run()
    assert told == [(1, [0]), (2, [0, 1])]
