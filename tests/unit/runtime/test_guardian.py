"""The guardian kills and removes what a dead controller left, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_async.runtime.guardian import Guardian, start_ticks

CONTROLLER = """
import sys, time
from forge_async.runtime.guardian import Guardian
guardian = Guardian()
guardian.add_process(int(sys.argv[1]))
guardian.add_process(int(sys.argv[2]), session=True)
guardian.add_process(int(sys.argv[3]), started=1)
guardian.add_path(sys.argv[4])
print(guardian.pid, flush=True)
time.sleep(60)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def sleeper(**options):
    return subprocess.Popen(["sleep", "60"], **options)


@pytest.fixture
def sleepers():
    started = [sleeper(process_group=0), sleeper(start_new_session=True), sleeper(start_new_session=True)]
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.timeout(30)
def test_after_a_killed_controller_its_processes_and_files_go_and_others_stay(sleepers, tmp_path):
    (tmp_path / "run_1").mkdir()
    (tmp_path / "run_1" / "socket").touch()
    (tmp_path / "run_2").touch()
    (tmp_path / "other").touch()
    ours, session, reused = sleepers
    arguments = [str(process.pid) for process in sleepers] + [str(tmp_path / "run_*")]
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, *arguments], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}
    )
    guardian_pid = int(controller.stdout.readline())
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    until(lambda: not is_running(guardian_pid))
    assert ours.poll() == session.poll() == -signal.SIGKILL
    assert reused.poll() is None  # its pid was told with another start time: a later process
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    controller.stdout.close()


def test_a_guardian_that_is_dismissed_touches_nothing(sleepers, tmp_path):
    guardian = Guardian()
    guardian.add_process(sleepers[0].pid)
    guardian.add_path(tmp_path)
    guardian.dismiss()
    guardian.dismiss()
    assert not is_running(guardian.pid)
    assert sleepers[0].poll() is None
    assert tmp_path.exists()


def test_an_interrupt_does_not_end_the_guardian(sleepers):
    guardian = Guardian()
    assert os.getsid(guardian.pid) == guardian.pid != os.getsid(0)
    guardian.dismiss()


def test_start_ticks_tell_processes_apart():
    assert start_ticks(os.getpid()) > 0
    assert start_ticks(2**22 + 1) == 0
