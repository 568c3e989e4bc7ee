"""The public actor API on real Monarch: every promise of DESIGN.md's section on it, kept by tiny actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from forge_async.actors import ForgeActor, Hosts, RemoteError, concurrent_endpoint, endpoint
from forge_async.actors.procs import Procs, faults
from forge_async.core.errors import ActorDiedError, ConfigError, StallError

pytestmark = [pytest.mark.stack, pytest.mark.timeout(40)]


KILLED = r"(was killed by SIGKILL|ended)"
"""How a killed process ends; before Linux 6.15 the signal is not always known."""


class UnknownHereError(Exception):
    """Pickles badly, as many do: its constructor takes more than its message."""

    def __init__(self, code, detail):
        super().__init__(f"{detail} ({code})")


class Toy(ForgeActor):
    def __init__(self, base=0, *, fail=""):
        if fail == "constructor":
            raise ValueError("no such base")
        from monarch.actor import current_rank

        self.base, self.fail, self.is_ready, self.notes = base, fail, False, []
        self.rank = current_rank().rank

    async def setup(self):
        if self.fail == "setup":
            raise RuntimeError("no such model")
        self.is_ready = True

    async def teardown(self):
        if self.fail == "teardown":
            await asyncio.sleep(60)

    @endpoint
    async def add(self, x):
        return self.base + x if self.is_ready else None

    @endpoint
    def where(self):
        return os.getpid(), threading.current_thread().name

    @concurrent_endpoint
    async def sleep(self, duration_s):
        await asyncio.sleep(duration_s)
        return os.getpid()

    @concurrent_endpoint
    async def wait_or_fail(self, failing):
        self.notes.append(failing)
        if self.rank == failing:
            raise ValueError("bad")
        await asyncio.Event().wait()

    @concurrent_endpoint
    async def note(self, number):
        self.notes.append(number)

    @concurrent_endpoint
    async def noted(self):
        return self.notes

    @endpoint
    async def sleep_alone(self, duration_s):
        await asyncio.sleep(duration_s)

    @endpoint
    def block(self, duration_s):
        time.sleep(duration_s)

    @endpoint
    def crash(self):
        os.abort()

    @endpoint
    def fail_with(self, what):
        errors = {"value": ValueError("bad"), "exit": SystemExit(3), "unknown": UnknownHereError(7, "bad")}
        raise errors.get(what) or StopIteration("bad")

    @concurrent_endpoint
    async def fail_concurrently(self):
        raise KeyError("bad")

    @concurrent_endpoint
    async def unpicklable(self):
        return threading.Lock()

    @endpoint
    async def variable(self, name):
        return os.environ.get(name)


class Caller(ForgeActor):
    def __init__(self, other):
        self.other = other

    @endpoint
    async def add_there(self, x):
        return await self.other.add.call_one(x)

    @endpoint
    async def add_with(self, other):
        return await other.add.call_one(1)

    @endpoint
    async def count_descriptors(self):
        return len(list(Path("/proc/self/fd").iterdir()))

    @endpoint
    async def sleep_there(self):
        return await self.other.sleep.call_one(30)


def is_gone(pid):
    return not Path(f"/proc/{pid}").exists()


async def until(condition, timeout_s=10.0):
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def toy(*args, **options):
    actor = await Toy.options(**options).as_actor(*args)
    try:
        yield actor
    finally:
        await actor.shutdown()


@contextlib.asynccontextmanager
async def toys(*args, **options):
    service = await Toy.options(**options).as_service(*args)
    try:
        yield service
    finally:
        await service.shutdown()


@pytest.fixture(autouse=True)
async def no_process_is_left():
    before = set(Procs.running)  # those that tests of another module share
    yield
    assert Procs.running <= before


async def test_an_actor_is_spawned_set_up_called_and_ended():
    actor = await Toy.as_actor(5)
    pid, thread = await actor.where.call_one()
    assert await actor.add.call_one(3) == 8
    assert (await actor.alive.call_one()).pid == pid == actor.pids[0] != os.getpid()
    assert thread != "MainThread"
    await actor.shutdown()
    await actor.shutdown()
    assert is_gone(pid)
    with pytest.raises(ActorDiedError, match="toy does not answer any more: it was shut down on purpose"):
        await actor.add.call_one(1)


async def test_what_users_raise_reaches_the_caller_and_not_the_actor():
    async with toy() as actor:
        with pytest.raises(ValueError, match="bad") as caught:
            await actor.fail_with.call_one("value")
        assert "fail_with" in caught.value.__notes__[0]
        with pytest.raises(KeyError, match="bad"):
            await actor.fail_concurrently.call_one()
        with pytest.raises(RemoteError, match="SystemExit: 3"):
            await actor.fail_with.call_one("exit")
        with pytest.raises(RemoteError, match=r"UnknownHereError: bad \(7\)") as caught:
            await actor.fail_with.call_one("unknown")
        assert caught.value.type_name == "UnknownHereError"
        with pytest.raises(RemoteError, match="StopIteration: bad"):
            await actor.fail_with.call_one("stop")
        with pytest.raises(RemoteError, match="cannot pickle"):
            await actor.unpicklable.call_one()
        with pytest.raises(TypeError):
            await actor.add.call_one(1, 2, 3)
        assert await actor.add.call_one(1) == 1


async def test_a_blocking_endpoint_leaves_the_actor_answering():
    async with toy() as actor:
        blocked = asyncio.ensure_future(actor.sleep.call_one(0.5))
        begin = time.monotonic()
        await actor.alive.call_one()
        assert time.monotonic() - begin < 0.3
        await blocked


async def test_a_call_past_its_deadline_is_named():
    async with toy() as actor:
        with pytest.raises(StallError, match=r"A call of toy.sleep waited 0.2 s for the answer from pid \d+"):
            await actor.sleep.call_one(30, timeout_s=0.2)
        assert await actor.add.call_one(1) == 1


@pytest.mark.parametrize("fail", ["constructor", "setup"])
async def test_a_failed_start_says_why_and_leaves_nothing(fail):
    with pytest.raises((ActorDiedError, RuntimeError), match="no such"):
        await Toy.as_actor(fail=fail)
    if fail == "constructor":  # Monarch calls that a fault, which by itself would end this process
        await until(lambda: any("no such base" in fault for fault in faults))


async def test_processes_that_cannot_start_are_reported_at_once():
    with pytest.raises(ActorDiedError, match="toy did not start on this host.*exit_code: 1"):
        await Toy.options(env={"PYTHONHOME": "/nonexistent"}).as_actor()


async def test_handles_that_come_with_messages_keep_no_descriptors():
    async with toy(5) as actor:
        caller = await Caller.as_actor(actor)
        await caller.add_with.call_one(actor)
        before = await caller.count_descriptors.call_one()
        for _ in range(5):
            assert await caller.add_with.call_one(actor) == 6
        assert await caller.count_descriptors.call_one() == before
        await caller.shutdown()


async def test_a_hanging_teardown_does_not_keep_the_process():
    actor = await Toy.options(stop_timeout_s=2.0).as_actor(fail="teardown")
    begin = time.monotonic()
    await actor.shutdown()
    assert time.monotonic() - begin < 3.0
    assert is_gone(actor.pids[0])


async def test_ranks_of_a_mesh_share_a_world_and_die_apart():
    async with toy(10, procs=2, spmd=True, env={"FORGE_TEST": "yes"}) as actor:
        assert await actor.variable.call("RANK") == ["0", "1"]
        assert await actor.variable.call("OMP_NUM_THREADS") == ["1", "1"]
        assert await actor.variable.call("FORGE_TEST") == ["yes", "yes"]
        assert await actor.rank(1).variable.call_one("LOCAL_RANK") == "1"
        rank_0 = actor.rank(0)
        os.kill(actor.pids[1], signal.SIGKILL)
        with pytest.raises(ActorDiedError, match=rf"rank 1, pid {actor.pids[1]} .* {KILLED}"):
            await actor.sleep.call(30)
        assert await rank_0.add.call_one(1) == 11


async def test_what_one_rank_raises_is_heard_while_the_others_wait_for_ever():
    """As ranks do that are in a collective operation which the one that failed never joins."""
    async with toy(procs=2) as actor:
        for failing in (0, 1):
            with pytest.raises(ValueError, match="bad") as raised:
                await actor.wait_or_fail.call_ranks(failing, timeout_s=20)
            assert f"raised in {actor.name}[{failing}].wait_or_fail" in raised.value.__notes__[0]
        assert await actor.noted.call() == [[0, 1], [0, 1]]


async def test_calls_of_all_ranks_come_to_each_in_the_same_order():
    async with toy(procs=2) as actor:
        await asyncio.gather(*(actor.note.call_ranks(number) for number in range(20)))
        assert await actor.noted.call() == [[*range(20)]] * 2


async def test_a_crash_of_native_code_leaves_its_stack_in_the_log(tmp_path):
    from monarch.actor import this_host

    hosts = Hosts(mesh=this_host(), log_dir=str(tmp_path))
    async with toy(hosts=hosts) as actor:
        with pytest.raises(ActorDiedError, match=r"SIGABRT|ended"):
            await actor.crash.call_one(timeout_s=20)
    log = (tmp_path / "toy-0.log").read_text()
    assert "Fatal Python error: Aborted" in log and "in crash" in log


async def test_a_handle_works_and_watches_in_another_actor():
    async with toy(5) as actor:
        caller = await Caller.as_actor(actor)
        assert await caller.add_there.call_one(2) == 7
        call = asyncio.ensure_future(caller.sleep_there.call_one())
        await asyncio.sleep(0.3)
        os.kill(actor.pids[0], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(ActorDiedError, match=f"pid {actor.pids[0]}"):
            await call
        assert time.monotonic() - begin < 5.0
        await caller.shutdown()


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="procs=0 is below 1"):
        Toy.options(procs=0)
    with pytest.raises(ConfigError, match="hosts=3 is not a host mesh"):
        Toy.options(hosts=3)
    with pytest.raises(TypeError, match="already use for the call's own deadline"):

        class Bad(ForgeActor):
            @endpoint
            async def wait(self, timeout_s):
                pass


async def test_gpus_are_handed_out_once_and_refused_when_there_are_none_left():
    from monarch.actor import this_host

    hosts = Hosts(mesh=this_host(), name="two gpus", num_gpus=2)
    async with toy(procs=2, with_gpus=True, hosts=hosts) as actor:
        assert await actor.variable.call("CUDA_VISIBLE_DEVICES") == ["0", "1"]
        with pytest.raises(ConfigError, match="it has 2 GPUs a host, 2 of them in use"):
            await Toy.options(with_gpus=True, hosts=hosts).as_actor()
    async with toy(with_gpus=True, hosts=hosts) as actor:
        assert await actor.variable.call("CUDA_VISIBLE_DEVICES") == ["0"]


async def test_a_service_routes_to_the_idle_and_fans_out_to_all():
    async with toys(1, num_replicas=2) as service:
        pids = [pids[0] for pids in (replica.pids for replica in service.health())]
        assert await service.add.fanout(1) == [2, 2]
        assert {(await service.where.route())[0] for _ in range(4)} == set(pids)
        assert (await service.where.to(1))[0] == pids[1]
        busy = asyncio.ensure_future(service.sleep.to(0, 0.5))
        await asyncio.sleep(0)
        assert [(await service.where.route())[0] for _ in range(3)] == [pids[1]] * 3
        assert await busy == pids[0]
        with pytest.raises(ValueError, match="bad"):
            await service.fail_with.route("value")
        with pytest.raises(StallError):
            await service.sleep.route(30, timeout_s=0.2)
        assert all(replica.healthy and replica.outstanding == 0 for replica in service.health())
    assert all(is_gone(pid) for pid in pids)


async def test_calls_of_a_session_stay_with_one_replica():
    async with toys(num_replicas=2) as service:
        async with service.session() as session:
            chosen = service.replicas[session.replica_index]
            routed = [(await service.where.route())[0] for _ in range(3)] + [(await session.where.route())[0]]
            assert set(routed) == set(chosen.health().pids)
            async with asyncio.TaskGroup() as group:
                inside = group.create_task(service.where.route())
            assert inside.result()[0] == routed[0]
            os.kill(routed[0], signal.SIGKILL)
            await until(lambda: not chosen.health().healthy)
            with pytest.raises(ActorDiedError, match=f"replica {chosen.index} of toy is gone.*{KILLED}"):
                await service.where.route()
        async with service.session() as session:
            assert session.replica_index == 1 - chosen.index
            assert (await service.where.route())[0] != routed[0]


async def test_a_replica_whose_respawn_is_under_way_when_its_arguments_are_renewed_gets_the_new_ones(monkeypatch):
    service = await Toy.options(max_restarts=1).as_service(base=1)
    spawn, spawned, may_return = service._spawn, asyncio.Event(), asyncio.Event()

    async def slow_spawn(index):
        handle = await spawn(index)
        spawned.set()
        await may_return.wait()
        return handle

    monkeypatch.setattr(service, "_spawn", slow_spawn)
    os.kill(service.health()[0].pids[0], signal.SIGKILL)
    await spawned.wait()
    service.renew(base=7)
    may_return.set()
    assert await service.add.route(1) == 8
    assert service.health()[0].restarts == 1
    await service.shutdown()


async def test_a_killed_replica_fails_its_calls_at_once_and_comes_back():
    async with toys(7, num_replicas=2) as service:
        deaths = []
        service.on_death.append(lambda index, error: deaths.append((index, str(error))))
        victim = service.health()[0].pids[0]
        call = asyncio.ensure_future(service.sleep.to(0, 30))
        await asyncio.sleep(0.2)
        os.kill(victim, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(ActorDiedError, match=rf"toy\[0\] \(rank 0, pid {victim} on .* {KILLED}"):
            await call
        assert time.monotonic() - begin < 5.0
        assert await service.add.route(1) == 8
        await until(lambda: service.health()[0].healthy)
        assert await service.add.fanout(1) == [8, 8]
        assert service.health()[0].restarts == 1
        assert deaths[0][0] == 0 and str(victim) in deaths[0][1]


async def test_a_replica_can_be_killed_and_replaced_five_times_and_no_more():
    async with toys(1, max_restarts=5) as service:
        seen = set()
        for _ in range(5):
            pid = service.health()[0].pids[0]
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: pid not in service.health()[0].pids)
            assert await service.add.route(1, timeout_s=20) == 2
        seen.add(service.health()[0].pids[0])
        os.kill(service.health()[0].pids[0], signal.SIGKILL)
        await until(lambda: not service.health()[0].healthy)
        with pytest.raises(ActorDiedError, match="No replica of toy is left"):
            await service.add.route(1)
        assert len(seen) == 6
    assert all(is_gone(pid) for pid in seen)


async def test_a_stuck_replica_can_be_given_up():
    async with toys(2) as service:
        pid = service.health()[0].pids[0]
        with pytest.raises(StallError):
            await service.sleep_alone.route(60, timeout_s=0.2)
        with pytest.raises(StallError):  # the stuck call still holds the actor, whose endpoints take turns
            await service.add.route(1, timeout_s=0.2)
        service.give_up(0, "it holds a call for too long")
        await until(lambda: is_gone(pid))
        assert await service.add.route(1, timeout_s=20) == 3


async def test_a_service_that_cannot_start_says_why_and_leaves_nothing():
    with pytest.raises(RuntimeError, match="no such model"):
        await Toy.options(num_replicas=2).as_service(fail="setup")


async def test_shutdown_ends_what_is_under_way():
    async with toys(num_replicas=2) as service:
        call = asyncio.ensure_future(service.sleep.route(30))
        await asyncio.sleep(0.1)
        await service.shutdown()
        with pytest.raises(ActorDiedError, match="shut down"):
            await call
        with pytest.raises(ActorDiedError, match="No replica of toy is left"):
            await service.add.route(1)
