"""Deaths are noticed at once and described rightly, for children, other local processes and those far away."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_async.actors import liveness
from forge_async.actors.liveness import Process, Watch, start_ticks
from forge_async.core.errors import ActorDiedError

pytestmark = [pytest.mark.stack, pytest.mark.timeout(20)]


KNOWS_REAPED = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 15)
"""Whether this kernel tells how a process ended that its parent has reaped."""


class Child:
    """A process of this test that sleeps, unless told to run something else."""

    def __init__(self, code="import time; time.sleep(60)"):
        self.popen = subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdout=subprocess.PIPE)
        self.process = described(self.popen.pid)

    def end(self):
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()


@pytest.fixture
def child():
    child = Child()
    yield child
    child.end()


def described(pid, **changes):
    process = Process(pid=pid, machine=liveness.this_machine(), started=start_ticks(pid))
    return dataclasses.replace(process, **changes)


def open_descriptors():
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def death_of(watch, timeout_s=5.0):
    return str(await asyncio.wait_for(watch.wait_for_death(), timeout_s))


async def test_a_killed_child_is_named_with_pid_and_signal(child):
    watch = Watch("policy", [child.process])
    waiting = asyncio.ensure_future(watch.wait_for_death())
    await asyncio.sleep(0.05)
    assert watch.died is None
    child.popen.send_signal(signal.SIGKILL)
    begin = time.monotonic()
    text = str(await asyncio.wait_for(waiting, 5))
    assert time.monotonic() - begin < 1.0
    assert f"policy (rank 0, pid {child.popen.pid} on " in text and "was killed by SIGKILL" in text
    assert str(watch.died) == text


async def test_an_exit_code_is_told_and_the_child_left_to_its_reaper():
    child = Child("import sys; sys.stdin.read() if 0 else sys.exit(7)")
    assert "exited with code 7" in await death_of(Watch("learner", [child.process]))
    assert child.popen.wait() == 7
    child.end()


async def test_the_status_of_a_child_is_told_though_another_reaps_it_first(child):
    reaping = asyncio.get_running_loop().run_in_executor(None, child.popen.wait)
    watch = Watch("policy", [child.process])
    waiting = asyncio.ensure_future(watch.wait_for_death())
    await asyncio.sleep(0.1)
    child.popen.send_signal(signal.SIGTERM)
    text = str(await asyncio.wait_for(waiting, 5))
    assert text.endswith("was killed by SIGTERM." if KNOWS_REAPED else ("was killed by SIGTERM.", "ended."))
    assert await reaping == -signal.SIGTERM


async def test_a_zombie_is_dead_and_a_reaped_pid_too(child):
    child.popen.kill()
    await asyncio.to_thread(os.waitid, os.P_PID, child.popen.pid, os.WEXITED | os.WNOWAIT)
    assert not child.process.is_running()
    assert "SIGKILL" in await death_of(Watch("zombie", [child.process]))
    child.popen.wait()
    assert "ended before it was watched" in await death_of(Watch("reaped", [child.process]))


async def test_a_pid_that_another_process_has_now_is_dead_and_never_signalled(child):
    earlier = described(child.popen.pid, started=child.process.started - 1)
    assert not earlier.is_running()
    assert "ended before it was watched" in await death_of(Watch("earlier", [earlier]))
    earlier.send(signal.SIGKILL)
    assert child.process.is_running()


async def test_a_process_that_is_not_our_child_is_watched_too(child):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    parent = Child(code)
    grandchild = described(int(parent.popen.stdout.readline()))
    waiting = asyncio.ensure_future(Watch("worker", [grandchild]).wait_for_death())
    await asyncio.sleep(0.05)
    grandchild.send(signal.SIGKILL)
    text = str(await asyncio.wait_for(waiting, 5))
    assert f"pid {grandchild.pid}" in text and (not KNOWS_REAPED or "was killed by SIGKILL" in text)
    parent.end()


async def test_without_pidfds_the_process_is_looked_at(child, monkeypatch):
    def no_pidfd(pid):
        raise OSError(38, "not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    waiting = asyncio.ensure_future(Watch("policy", [child.process]).wait_for_death())
    await asyncio.sleep(0.1)
    child.process.send(signal.SIGKILL)
    assert str(await asyncio.wait_for(waiting, 5)).endswith("ended.")


async def test_a_guarded_call_gives_its_value_its_error_or_the_death(child):
    watch = Watch("policy", [child.process])

    async def call(value):
        await asyncio.sleep(0.01)
        if isinstance(value, Exception):
            raise value
        return value

    assert await watch.guard(call(3)) == 3
    with pytest.raises(KeyError):
        await watch.guard(call(KeyError("x")))
    hanging = asyncio.ensure_future(watch.guard(asyncio.sleep(60)))
    await asyncio.sleep(0.05)
    child.popen.kill()
    with pytest.raises(ActorDiedError, match="policy .* was killed by SIGKILL"):
        await asyncio.wait_for(hanging, 5)
    with pytest.raises(ActorDiedError):
        await watch.guard(call(3))


async def test_a_call_of_monarch_s_is_guarded_by_its_own_future_without_a_task(child):
    class Call:
        """Monarch's `Future`, as far as a guard looks."""

        def __init__(self):
            self.future = asyncio.get_running_loop().create_future()

        def as_asyncio(self):
            return self.future

    watch, answered, hanging = Watch("policy", [child.process]), Call(), Call()
    waiting = [asyncio.create_task(watch.guard(call)) for call in (answered, hanging)]
    await asyncio.sleep(0)
    assert asyncio.all_tasks() - {asyncio.current_task()} == set(waiting)
    answered.future.set_result(3)
    assert await waiting[0] == 3
    child.popen.kill()
    with pytest.raises(ActorDiedError, match="policy .* was killed by SIGKILL"):
        await asyncio.wait_for(waiting[1], 5)
    assert hanging.future.cancelled(), "nobody waits for its answer any more"


async def test_what_monarch_reports_of_a_failed_actor_is_a_death(child):
    async def call():
        raise liveness.SupervisionError(
            "Endpoint call failed: Traceback (most recent call last):\n  ...\nOSError: full"
        )

    watch = Watch("replay", [child.process])
    with pytest.raises(ActorDiedError, match="replay failed: OSError: full"):
        await watch.guard(call())
    assert watch.died


async def test_closing_fails_what_waits_and_keeps_no_descriptor(child):
    before = open_descriptors()
    watch = Watch("policy", [child.process])
    hanging = asyncio.ensure_future(watch.guard(asyncio.sleep(60)))
    await asyncio.sleep(0.05)
    watch.close()
    with pytest.raises(ActorDiedError, match="shut down on purpose"):
        await hanging
    assert watch.closed
    child.end()
    await asyncio.sleep(0.1)
    assert open_descriptors() <= before


@pytest.mark.parametrize("how", ["silent", "unreachable"])
async def test_a_far_process_is_dead_when_its_beats_stop(how, monkeypatch):
    monkeypatch.setattr(liveness, "BEAT_EVERY_S", 0.05)
    monkeypatch.setattr(liveness, "BEAT_DEADLINE_S", 0.1)
    beats = []

    async def beat(rank):
        beats.append(rank)
        if len(beats) > 3:
            if how == "unreachable":
                raise ConnectionError("no route")
            await asyncio.sleep(60)

    far = described(1, machine="node7/boot/pid", rank=2)
    text = await death_of(Watch("policy", [far], beat))
    assert "policy (rank 2, pid 1 on node7)" in text
    assert ("gave no sign of life" if how == "silent" else "cannot be reached: no route") in text
    assert len(beats) >= 4


def test_the_time_to_notice_a_far_death_is_under_five_seconds():
    assert liveness.BEAT_EVERY_S + 2 * liveness.BEAT_DEADLINE_S < 5
