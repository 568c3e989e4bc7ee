"""Placement: two hosts on this machine, private temporary files, logs, and no process left, whatever ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from forge_async.actors.forge_actor import ForgeActor, endpoint
from forge_async.actors.procs import visible_gpus
from forge_async.config.job import JobSettings
from forge_async.runtime.meshes import LONGEST_TMP, Placement

pytestmark = [pytest.mark.stack, pytest.mark.timeout(60)]


class Place(ForgeActor):
    @endpoint
    async def look(self):
        print("looked")
        return os.getpid(), os.getppid(), tempfile.gettempdir()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="run") as folder:  # short, unlike pytest's own
        yield Path(folder)


@pytest.mark.parametrize("kind", ["local", "process"])
async def test_roles_have_hosts_private_files_and_logs_and_an_end(kind, run_dir):
    tmpdir = os.environ.get("TMPDIR")
    async with await Placement.start(JobSettings(kind=kind), run_dir) as placement:
        learner = await Place.options(hosts=placement.learner, mesh_name="learner").as_actor()
        policy = await Place.options(hosts=placement.policy, mesh_name="policy").as_actor()
        seen = [await actor.look.call_one() for actor in (learner, policy)]
        hosts = {parent for _, parent, _ in seen}
        assert len(hosts) == (2 if kind == "process" else 1)
        assert (os.getpid() in hosts) == (kind == "local")
        assert {folder for _, _, folder in seen} == {str(run_dir.resolve() / "tmp")}
        assert "looked" in (run_dir / "logs" / "policy-0.log").read_text()
    pids = [pid for pid, _, _ in seen] + [placement.guardian.pid]
    assert not any(is_running(pid) for pid in pids + list(hosts - {os.getpid()}))
    assert [path.name for path in run_dir.iterdir()] == ["logs"]
    assert os.environ.get("TMPDIR") == tmpdir


@pytest.mark.parametrize("hosts", [0, 1])
async def test_a_reference_service_has_a_host_of_its_own_or_the_learners(hosts, run_dir):
    async with await Placement.start(JobSettings(kind="process", reference_hosts=hosts), run_dir) as placement:
        learner = await Place.options(hosts=placement.learner, mesh_name="learner").as_actor()
        reference = await Place.options(hosts=placement.reference, mesh_name="reference").as_actor()
        (_, beside, _), (_, host, _) = [await actor.look.call_one() for actor in (learner, reference)]
        assert host != os.getpid() and (host == beside) == (hosts == 0)


async def test_a_long_run_directory_gets_its_temporary_files_elsewhere(run_dir):
    placement = await Placement.start(JobSettings(), run_dir / ("long" * 20))
    assert len(str(placement.tmp)) < LONGEST_TMP
    assert placement.tmp.exists()
    await placement.stop()
    await placement.stop()
    assert not placement.tmp.exists()


CONTROLLER = """
import asyncio, os, sys
from forge_async.config.job import JobSettings
from forge_async.runtime.meshes import Placement
from test_meshes import Place

async def main():
    placement = await Placement.start(JobSettings(kind="process"), sys.argv[1])
    actors = [await Place.options(hosts=hosts).as_actor() for hosts in (placement.policy, placement.controller)]
    seen = [await actor.look.call_one() for actor in actors]
    print(*{pid for pids in seen for pid in pids[:2]} - {os.getpid()}, placement.guardian.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_controller_leaves_no_process_and_no_temporary_file(run_dir):
    long_tmpdir = run_dir / ("long" * 20)  # no socket can be named in it
    long_tmpdir.mkdir()
    path = os.pathsep.join([str(Path.cwd()), str(Path(__file__).parent)])
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(long_tmpdir)},
    )
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 4 and all(is_running(pid) for pid in pids)
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    deadline = time.monotonic() + 15
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not (run_dir / "tmp").exists()
    controller.stdout.close()


def test_processes_see_their_own_gpus_first_and_then_those_that_all_share():
    assert visible_gpus((4, 5, 6, 7), 2, ()) == ["4,5", "6,7"]
    assert visible_gpus((4, 0), 2, (0,)) == ["4,0", "0"]
    assert visible_gpus((), 2, (0,)) == ["0", "0"]
    assert visible_gpus((), 1, ()) == [""]
