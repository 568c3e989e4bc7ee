"""A store that dies at any moment of a run is replaced, and the run goes on as if it had not."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.core.errors import ActorDiedError, FingerprintError, StallError, WeightsError, unwrap
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.publish import Publisher
from forge_async.pipeline.ring import Ring, RingSettings
from forge_async.pipeline.store_keeper import StoreKeeper, StoreRestart
from tests.fakes import FakeLearnerMesh, FakeReplay, FakeReplica, FakeWorkers, make_pull
from tests.unit.pipeline.test_ring import Notes

pytestmark = pytest.mark.timeout(60)
GROUPS, STEPS = 2, 5


class MortalStore:
    """A store's process that dies at operations of given numbers, before or after their effect; news of it may be late.

    `replace` fails as often as `stillborn` says.
    """

    def __init__(self, die_at=(), late=0, stillborn=0):
        self.die_at, self.late, self.stillborn = set(die_at), late, stillborn
        self.operations, self.num_processes, self.num_deaths = [], 1, 0
        self.needs: dict[PolicyVersion, frozenset[PolicyVersion]] = {}
        """What can be read, and what that is built on."""
        self.written: dict[PolicyVersion, set[object]] = {}
        """All bits that were ever published under a version."""
        self._died = asyncio.Event()

    def die(self):
        self._died.set()

    @property
    def is_dead(self):
        return self._died.is_set()

    async def operate(self, name):
        await asyncio.sleep(0)
        self.operations.append(name)
        if len(self.operations) in self.die_at and not self.is_dead:
            self.num_deaths += 1
            self.die()
        if self.is_dead:
            raise ActorDiedError(f"store died at {name}.")

    async def wait_for_death(self):
        await self._died.wait()
        for _ in range(self.late):
            await asyncio.sleep(0)
        return ActorDiedError("store was killed.")

    async def replace(self):
        await asyncio.sleep(0)
        if self.stillborn:
            self.stillborn -= 1
            raise ActorDiedError("store did not start.")
        self.num_processes += 1
        self.needs = {}
        self._died = asyncio.Event()


class Ranks(FakeLearnerMesh):
    """Learner ranks that keep what they staged last, and publish to a store that may die."""

    def __init__(self, replay, process):
        super().__init__(replay)
        self.process, self.last, self.bits = process, None, {}

    async def snapshot(self):
        self.bits.setdefault(self.version, object())
        return await super().snapshot()

    async def step(self, step, snapshot):
        answer = await super().step(step, snapshot)
        if snapshot:
            self.bits[self.version] = object()
        return answer

    async def stage(self, version):
        if self.last != version:
            self._snapshots.remove(version)
            self.last = version
        await self.process.operate("stage")
        await self.process.operate("staged")

    async def commit(self, version, retire=()):
        assert version == self.last, "the bits of any other are gone"
        await self.process.operate("commit")
        self.store = [each for each in self.store if each in self.process.needs]
        committed = await super().commit(version)
        self.process.needs[version] = committed.needs
        self.process.written.setdefault(version, set()).add(self.bits[version])
        for old in retire:
            self.process.needs.pop(old, None)
            self.retired_with_commit.append(old)
        await self.process.operate("committed")
        return committed

    async def retire(self, version):
        await self.process.operate("retire")
        self.process.needs.pop(version, None)
        self.retired.append(version)
        await self.process.operate("retired")


class Reader(FakeReplica):
    """A replica that reads from the store that is there, and serves what it read whole."""

    def __init__(self, name, process):
        super().__init__(name)
        self.process, self.served = process, []

    async def pull(self, version):
        processes = self.process.num_processes
        await self.process.operate("pull")
        if version not in self.process.needs:
            raise WeightsError(f"{version} is not in the store.")
        assert self.process.needs[version] <= self.process.needs.keys(), "what it is built on is there too"
        await self.process.operate("pulled")
        if processes != self.process.num_processes:
            raise ActorDiedError("store died while it was read.")
        self.version = version
        self.served.append(version.step)
        return make_pull(version)


class World:
    """A ring over fakes whose store is kept."""

    def __init__(self, process, *, limit=2, max_staleness=0, num_replicas=2, notice_s=0.05, keep=1):
        self.process, self.told, self.was_told = process, [], asyncio.Event()
        self.replay = FakeReplay(GROUPS, max_staleness)
        self.learner = Ranks(self.replay, process)
        self.replicas = [Reader(f"policy_{number}", process) for number in range(num_replicas)]
        self.keeper = StoreKeeper(process, limit, self.hear, notice_s=notice_s)
        self.publisher = Publisher(self.learner, self.replay, keep, store=self.keeper)
        self.notes = Notes()
        self.ring = Ring(
            replay=self.replay,
            learner=self.learner,
            replicas=self.replicas,
            workers=FakeWorkers(self.replay, self.replicas),
            publisher=self.publisher,
            observer=self.notes,
            settings=RingSettings(num_steps=STEPS, groups_per_step=GROUPS, publish_every=1),
        )

    def hear(self, restart):
        self.told.append(restart)
        self.was_told.set()

    async def run(self):
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self.keeper.run(self.publisher.republish))
            await self._whole_run()
            while len(self.told) < self.process.num_deaths:  # a death at the very end is mended too
                self.was_told.clear()
                await self.was_told.wait()
            keeping.cancel()

    async def _whole_run(self):
        version = await self.learner.snapshot()
        await self.publisher.publish(version)
        await asyncio.gather(*(self.publisher.pull(replica, version) for replica in self.replicas))
        for replica in self.replicas:
            await self.replay.add_replica(replica.name, 0)
        await self.ring.run(version)


def check(world, max_staleness):
    assert world.replay.trained_steps == list(range(STEPS)), "each step once"
    assert world.replay.published_steps == list(range(STEPS + 1)), "each version is told once"
    assert max(world.replay.staleness) <= max_staleness
    for replica in world.replicas:
        assert replica.served == sorted(replica.served) and replica.served[-1] == STEPS
    assert all(len(bits) == 1 for bits in world.process.written.values()), "no version has two contents"
    assert max(world.process.needs).step == STEPS, "the newest version is in the store that is there"


async def run_with(max_staleness=0, deltas=False, keep=1, **mortality):
    world = World(MortalStore(**mortality), max_staleness=max_staleness, keep=keep)
    world.learner.deltas = deltas
    await asyncio.wait_for(world.run(), 20)
    check(world, max_staleness)
    return world


async def number_of_operations(max_staleness, keep):
    return len((await run_with(max_staleness, keep=keep)).process.operations)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_store_that_dies_at_any_one_operation_is_replaced_once(max_staleness, late, keep):
    seen = set()
    for at in range(1, await number_of_operations(max_staleness, keep) + 1):
        world = await run_with(max_staleness, die_at=[at], late=late, keep=keep)
        seen.add(world.process.operations[at - 1])
        assert world.process.num_processes == 2
        assert [restart.number for restart in world.told] == [1]
        assert len(world.process.needs) <= keep, "and nothing is left over"
    alone = {"retire", "retired"} if keep == 1 else set()
    assert seen == {"stage", "staged", "commit", "committed", "pull", "pulled"} | alone


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=2, unique=True),
    st.integers(0, 2),
    st.integers(0, 4),
    st.booleans(),
    st.integers(1, 3),
)
def test_a_store_that_dies_twice_is_replaced_twice(die_at, max_staleness, late, deltas, keep):
    async def twice():
        world = await run_with(max_staleness, deltas, keep, die_at=die_at, late=late)
        assert world.process.num_processes == 1 + world.process.num_deaths
        assert [restart.number for restart in world.told] == list(range(1, world.process.num_processes))

    asyncio.run(twice())


async def test_between_two_operations_a_death_is_mended_too_and_told():
    process = MortalStore()
    world = World(process)
    clock = itertools.count(100)
    world.keeper._now_s = lambda: next(clock)
    version = await world.learner.snapshot()
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(world.keeper.run(world.publisher.republish))
        await world.publisher.publish(version)
        process.die()
        await world.was_told.wait()
        keeping.cancel()
    assert list(process.needs) == [version]
    assert world.told == [
        StoreRestart(number=1, limit=2, cause="store was killed.", died_s=100, duration_s=1, version=version)
    ]
    assert world.told[0].sentence == (
        "store was killed. Another took its place and has policy@0.0, 1.0 s later (1 of 2)."
    )


async def test_what_a_death_broke_off_is_counted():
    at = (await run_with()).process.operations.index("pull") + 1
    [restart] = (await run_with(die_at=[at])).told
    assert 1 <= restart.num_repeated <= 2, "both replicas may have been pulling"
    told = "1 operation that it broke off was" if restart.num_repeated == 1 else "2 operations that it broke off were"
    assert restart.sentence.endswith(f"(1 of 2). {told} tried again.")
    assert restart.record["repeated"] == restart.num_repeated


async def test_a_version_that_was_lost_is_pulled_as_the_newest():
    process = MortalStore()
    world = World(process)
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(world.keeper.run(world.publisher.republish))
        for step in range(2):
            world.learner.version = PolicyVersion(step=step)
            await world.publisher.publish(await world.learner.snapshot())
        process.die()
        pull = await world.publisher.pull(world.replicas[0], PolicyVersion(step=0))
        keeping.cancel()
    assert pull.version == PolicyVersion(step=1)


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_the_death_that_is_one_too_many_ends_the_run_by_name(limit):
    process = MortalStore(die_at=range(5, 1000, 3))
    world = World(process, limit=limit)
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(world.run(), 20)
    error = unwrap(caught.value)
    assert isinstance(error, ActorDiedError)
    assert process.num_processes == 1 + limit
    expected = "store was killed."
    if limit:
        expected += f" No other takes its place: weights.store_restarts={limit} are used up."
    assert str(error) == expected


async def test_processes_that_do_not_come_to_life_count():
    assert (await run_with(die_at=[7], stillborn=1)).process.num_processes == 2
    world = World(MortalStore(die_at=[7], stillborn=2))
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(world.run(), 20)
    assert str(unwrap(caught.value)) == (
        "store was killed. No other takes its place: weights.store_restarts=2 are used up; the last one did not come "
        "to life: store did not start."
    )


async def test_where_it_may_not_be_replaced_the_error_says_why():
    world = World(MortalStore(die_at=[7]), limit=0)
    world.keeper._remark = "With this transport no other takes its place."
    with pytest.raises(BaseExceptionGroup) as caught:
        await asyncio.wait_for(world.run(), 20)
    assert str(unwrap(caught.value)) == "store was killed. With this transport no other takes its place."


@pytest.mark.parametrize("error", [FingerprintError("w differs."), StallError("too slow."), OSError("disk")])
async def test_what_fails_while_the_store_lives_is_final(error):
    world = World(MortalStore())

    async def fail():
        raise error

    with pytest.raises(type(error)):
        await world.keeper.through(fail)


async def test_a_death_that_is_known_here_a_moment_later_is_waited_for():
    process = MortalStore(die_at=[1], late=50)
    world = World(process, notice_s=5)
    tries = itertools.count(1)

    async def ask():
        await process.operate("ask")
        return next(tries)

    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(world.keeper.run(world.publisher.republish))
        assert await world.keeper.through(ask) == (1, 1)
        keeping.cancel()
    assert process.operations == ["ask", "ask"]
