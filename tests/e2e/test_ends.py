"""However a run ends, it says why, exits with the right code, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from e2e.runs import (
    TINY,
    Finished,
    descendants,
    finish,
    nothing_left,
    parity_reward,
    processes_of,
    shared_memory,
    start,
    wait_for_steps,
)

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]

LONG = ["steps=100000"]


def interrupt_after_steps(tmp_path: Path, words: list[str], act) -> tuple[Finished, float]:
    """Start a run, do something to it after two steps, and return how it ended and how long that took."""
    before, folder = shared_memory(), tmp_path / "run"
    process = start(tmp_path, [*words, *TINY, f"run.dir={folder}"])
    wait_for_steps(folder, 2, process)
    pids = descendants(process.pid) | {process.pid}
    act(process, folder)
    begun = time.monotonic()
    finished = finish(process, folder, timeout_s=60)
    took = time.monotonic() - begun
    nothing_left(pids)
    assert shared_memory() <= before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("vllm", "forge-", "tmp"))]
    return finished, took


def test_an_interrupted_run_keeps_its_records_and_exits_with_130(tmp_path: Path, tiny_model: Path) -> None:
    run, _ = interrupt_after_steps(
        tmp_path, [*LONG, f"model.path={tiny_model}"], lambda process, _: os.killpg(process.pid, signal.SIGINT)
    )
    assert run.code == 130, run.output
    assert run.summary["status"] == "interrupted"
    assert run.summary["steps"] == len(run.rows) >= 2
    ended = [event["index"] for event in run.events]
    assert sorted(ended) == list(range(len(ended))), "every admitted group ends exactly once"


def test_a_killed_policy_ends_the_run_by_name_within_five_seconds(tmp_path: Path, tiny_model: Path) -> None:
    run, took = interrupt_after_steps(
        tmp_path,
        [*LONG, f"model.path={tiny_model}"],
        lambda _, folder: os.kill(processes_of(folder)["policy_0-0"], signal.SIGKILL),
    )
    assert run.code == 1, run.output
    assert run.summary["status"] == "failed"
    assert "policy_0" in run.summary["error"]
    assert "policy_0" in run.output.splitlines()[-1]
    assert took < 5 + 12, "noticed within 5 s, ended within the stop deadline"


def test_a_store_that_dies_while_the_run_is_started_ends_it_by_name(tmp_path: Path, tiny_model: Path) -> None:
    before, folder = shared_memory(), tmp_path / "run"
    process = start(tmp_path, [*LONG, f"model.path={tiny_model}", *TINY, f"run.dir={folder}"])
    assert process.stdout is not None
    until_ready = []
    for line in process.stdout:
        until_ready.append(line)
        if line.startswith("store ready"):
            break
    pids, victim = descendants(process.pid) | {process.pid}, processes_of(folder)["store-0"]
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    run = finish(process, folder, timeout_s=60)
    took = time.monotonic() - begun
    nothing_left(pids)
    assert shared_memory() <= before
    assert run.code == 1, run.output
    error = run.summary["error"]
    assert error.startswith(f"store (rank 0, pid {victim} ") and "was killed by SIGKILL" in error
    assert run.output.splitlines()[-1] == f"failed: {error}"
    assert "policy_0 ready" not in "".join(until_ready) + run.output, "it is told while others still start"
    assert took < 5 + 12, "noticed within 5 s, ended within the stop deadline"


def test_a_killed_controller_leaves_no_process_behind(tmp_path: Path, tiny_model: Path) -> None:
    run, _ = interrupt_after_steps(
        tmp_path, [*LONG, f"model.path={tiny_model}"], lambda process, _: process.send_signal(signal.SIGKILL)
    )
    assert run.code == -signal.SIGKILL
    assert len(run.rows) >= 2, "what was written before is readable"


def test_a_reward_that_hangs_ends_the_run_and_is_named(tmp_path: Path, tiny_model: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(
        "import time\n\n\ndef score(completion):\n    score.calls = getattr(score, 'calls', 0) + 1\n"
        "    time.sleep(60 if score.calls > 70 else 0)\n    return float(len(completion))\n"
    )
    folder = tmp_path / "run"
    words = [f"reward={reward}:score", "reward_timeout_s=1", f"model.path={tiny_model}", *TINY, *LONG]
    process = start(tmp_path, [*words, f"run.dir={folder}"])
    pids: set[int] = set()
    while process.poll() is None and not pids:
        time.sleep(1.0)
        pids = descendants(process.pid)
    run = finish(process, folder)
    nothing_left(pids)
    assert run.code == 1, run.output
    assert "mine.py" in run.summary["error"] and "1 s" in run.summary["error"], run.summary["error"]


def test_a_loss_that_is_not_finite_ends_the_run_and_names_the_step(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "run"
    words = [
        f"model.path={tiny_model}", "optimizer.lr=1e20", "optimizer.warmup_steps=0", "advantage.zero_variance=keep",
        f"reward={parity_reward(tmp_path)}", "sampling.temperature=1.5", *TINY, "steps=20",
    ]  # fmt: skip
    run = finish(start(tmp_path, [*words, f"run.dir={folder}"]), folder)
    assert run.code == 1, run.output
    assert "not finite" in run.summary["error"] and "Step" in run.summary["error"]
    assert run.summary["status"] == "failed"
