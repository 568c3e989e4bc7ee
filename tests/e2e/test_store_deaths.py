"""The weight store's process dies in the middle of a run, which goes on with another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest
from e2e.runs import (
    TINY,
    Finished,
    alive,
    descendants,
    finish,
    nothing_left,
    parity_reward,
    processes_of,
    shared_memory,
    start,
    until,
    wait_for_steps,
)
from e2e.runs import run as run_whole

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

NOTICED_S = 5
ENDED_S = 12
"""As `run.stop_timeout_s`."""


def segments_of(pid: int) -> int:
    """How many segments of stores, dead ones too, a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "forge_async-weights" in line})


def store_of(folder: Path, dead: set[int]) -> int:
    """Pid of the run's store; one that has just taken a dead one's place is waited for."""
    return until(lambda: {processes_of(folder).get("store-0", 0)} - dead - {0}, 60, "no other store came").pop()


def run_with_deaths(
    tmp_path: Path, words: list[str], *, at_steps: list[int], look: Callable[[Popen, Path], None] | None = None
) -> tuple[Finished, float]:
    """A run whose store is killed after so many steps; and the seconds from the last death to its end.

    `look` is called after the last death, with the run and its folder.
    """
    before, folder, pids = shared_memory(), tmp_path / "run", set()
    process = start(tmp_path, [*words, *TINY, f"run.dir={folder}"])
    for count in at_steps:
        wait_for_steps(folder, count, process)
        store = store_of(folder, pids)
        pids |= descendants(process.pid) | {process.pid}
        os.kill(store, signal.SIGKILL)
    killed_s = time.monotonic()
    if look is not None:
        look(process, folder)
    finished = finish(process, folder, timeout_s=240)
    took_s = time.monotonic() - killed_s
    nothing_left(pids)
    assert shared_memory() <= before
    assert not alive(set(processes_of(folder).values()))
    return finished, took_s


def restarts(run: Finished) -> list[dict]:
    assert {event["event"] for event in run.incidents} <= {"store_restarted"}, "nothing else went wrong"
    return run.incidents


def check_whole(run: Finished, num_steps: int, num_restarts: int) -> None:
    """It went on to its end: every step, every group and every version once, and what was served was published."""
    assert run.code == 0, run.output
    assert [row["step"] for row in run.rows] == list(range(1, num_steps + 1))
    groups = [event["index"] for event in run.events]
    assert sorted(groups) == list(range(len(groups))), "every admitted group ends exactly once"
    assert run.summary["groups/trained"] == num_steps * 8
    assert run.summary["staleness/max"] <= run.summary["staleness/bound"]
    assert run.summary["weights/store_restarts"] == len(restarts(run)) == num_restarts
    assert [event["number"] for event in restarts(run)] == list(range(1, num_restarts + 1))
    told = [line for line in run.output.splitlines() if "Another took its place" in line]
    assert len(told) == num_restarts and all("store" in line and "SIGKILL" in line for line in told)
    often = {1: "once", 2: "twice"}[num_restarts]
    assert f"mended: the weight store died and another took its place ({often}, " in run.output
    assert f"The weight store died and another took its place {often} " in run.page


def test_a_run_whose_store_is_killed_twice_trains_all_its_steps(tmp_path: Path, tiny_model: Path) -> None:
    """`weights.verify=full`: a replica that serves what was not published ends the run."""
    steps = 100

    def look(process: Popen, folder: Path) -> None:
        """Nobody keeps memory of stores that are dead: two versions are kept, and two segments more are in use."""
        wait_for_steps(folder, 70, process)
        pids = processes_of(folder)
        assert max(segments_of(pids[name]) for name in ("learner-0", "policy_0-0")) <= 5

    words = [f"model.path={tiny_model}", f"steps={steps}", "weights.verify=full", "advantage.zero_variance=keep"]
    run, _ = run_with_deaths(tmp_path, words, at_steps=[2, 40], look=look)
    check_whole(run, steps, 2)
    for event in restarts(run):
        assert event["duration_s"] < 30
        assert "killed by SIGKILL" in event["cause"]


def test_the_death_that_is_one_too_many_ends_the_run_by_name(tmp_path: Path, tiny_model: Path) -> None:
    words = [f"model.path={tiny_model}", "steps=100000", "weights.store_restarts=1", "advantage.zero_variance=keep"]
    run, took_s = run_with_deaths(tmp_path, words, at_steps=[2, 40])
    assert run.code == 1, run.output
    assert run.summary["status"] == "failed"
    assert "store" in run.summary["error"] and "SIGKILL" in run.summary["error"]
    assert run.summary["error"].endswith("No other takes its place: weights.store_restarts=1 are used up.")
    assert run.output.splitlines()[-1] == f"failed: {run.summary['error']}"
    assert took_s < NOTICED_S + ENDED_S


@pytest.mark.long
def test_without_restarts_its_death_ends_the_run_by_name(tmp_path: Path, tiny_model: Path) -> None:
    words = [f"model.path={tiny_model}", "steps=100000", "weights.store_restarts=0"]
    run, took_s = run_with_deaths(tmp_path, words, at_steps=[2])
    assert run.code == 1, run.output
    assert run.summary["error"].startswith("store (rank 0, pid ") and "SIGKILL" in run.summary["error"]
    assert "takes its place" not in run.summary["error"]
    assert took_s < NOTICED_S + ENDED_S


@pytest.mark.long
@pytest.mark.parametrize("delta", ["never", "always"])
def test_a_synchronous_run_ends_with_the_weights_that_it_would_have_had(
    tmp_path: Path, tiny_model: Path, delta: str
) -> None:
    words = [
        "async.max_staleness=0", "steps=12", "weights.verify=full", f"weights.delta={delta}",
        f"model.path={tiny_model}", f"reward={parity_reward(tmp_path)}", "policy.replicas=2",
    ]  # fmt: skip
    run, _ = run_with_deaths(tmp_path, words, at_steps=[3])
    check_whole(run, 12, 1)
    (tmp_path / "other").mkdir()
    undisturbed = run_whole(tmp_path / "other", [*words, *TINY])
    assert run.summary["weights_sha256"] == undisturbed.summary["weights_sha256"]


WAYS = {
    "broadcast": ["weights.transport=broadcast", "policy.replicas=2"],
    "rpc": ["weights.transport=rpc", "learner.ranks=2"],
    "rdma": ["weights.transport=rdma", "weights.rdma_backend=tcp", "weights.delta=never"],
    "filesystem": ["weights.transport=filesystem"],
    "http": ["weights.transport=http", "weights.delta=never"],
    "adapters": ["learner.lora.rank=4"],
    "engine ranks": ["policy.tensor_parallel=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_however_weights_travel_the_run_goes_on(tmp_path: Path, tiny_model: Path, way: str) -> None:
    words = [f"model.path={tiny_model}", "steps=30", "weights.verify=full", "advantage.zero_variance=keep", *WAYS[way]]
    run, _ = run_with_deaths(tmp_path, words, at_steps=[4])
    check_whole(run, 30, 1)
    assert run.rows[-1]["weights/damaged_deltas"] == 0
