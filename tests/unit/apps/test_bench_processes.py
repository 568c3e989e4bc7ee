"""Which process is what, and what it used."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from forge_async.apps.bench.processes import CONTROLLER, OTHER, REWARD, ProcessTree, actor_kind, descendants, log_name

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")


def test_an_actor_is_called_by_its_log_without_replica_and_rank():
    assert [actor_kind(log) for log in ("policy_0-0.log", "learner-1.log", "rollout_12-0.log", "store-0.log")] == [
        "policy",
        "learner",
        "rollout",
        "store",
    ]


def test_descendants_come_after_their_parents_and_strangers_not_at_all():
    assert descendants(1, {2: 1, 3: 2, 4: 9, 5: 3, 6: 1}) == [1, 2, 6, 3, 5]


@needs_proc
def test_every_process_of_a_run_has_its_role(tmp_path):
    """A controller that starts an actor with a worker of its own, and a helper beside."""
    (tmp_path / "logs").mkdir()
    script = f"sh -c 'sleep 60 & wait' >{tmp_path}/logs/rollout_0-0.log & sleep 60 & wait"
    with subprocess.Popen(["sh", "-c", script], start_new_session=True) as process:
        try:
            tree, roles = ProcessTree(process.pid), {}
            deadline = time.monotonic() + 20
            while len(roles) < 4 and time.monotonic() < deadline:
                roles = tree.read()
                time.sleep(0.02)
            assert set(roles) == {CONTROLLER, "rollout", REWARD, OTHER}
            assert all(cpu_s >= 0 for cpu_s in roles.values())
        finally:
            os.killpg(process.pid, 9)
    assert set(tree.read()) == set(roles)  # ended ones are remembered


@needs_proc
def test_a_process_whose_output_is_no_log_has_no_name(tmp_path):
    with (tmp_path / "x.log").open("w") as output, subprocess.Popen(["sleep", "60"], stdout=output) as process:
        assert log_name(process.pid) == ""
        process.kill()
    assert log_name(process.pid) == ""
