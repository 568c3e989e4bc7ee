"""Whole runs: what they write, with one and with several processes of a kind."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest
from e2e.runs import TINY, finish, processes_of, run, start, wait_for_steps

from forge_async.observe.names import check_row, is_known
from forge_async.observe.rollout_log import read_rollouts
from forge_async.replay.events import Taken, Trained
from forge_async.replay.journal import Journal
from forge_async.runtime.resume import JOURNAL
from tests.models import make_model

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def test_an_asynchronous_run_tells_its_story(tmp_path: Path, tiny_model: Path) -> None:
    words = [
        f"model.path={tiny_model}", "task.name=sum", "groups_per_step=16", "group_size=8", "steps=8",
        "eval.num_prompts=20", "optimizer.lr=0.001", "observe.tensorboard=true", "checkpoint.every_steps=4",
    ]  # fmt: skip
    ours = run(tmp_path, words)
    assert ours.code == 0, ours.output
    summary = ours.summary
    assert (summary["status"], summary["steps"], summary["staleness/bound"]) == ("completed", 8, 2)
    assert 1 <= summary["staleness/max"] <= 2, "batches overlap, within the bound"
    assert summary["groups/admitted"] == sum(
        summary[f"groups/{outcome}"] for outcome in ("trained", "filtered", "failed", "expired", "cancelled")
    )
    assert summary["groups/trained"] == 8 * 16
    assert 0 <= summary["eval/before"] <= 1 and 0 <= summary["eval/after"] <= 1
    for number, row in enumerate(ours.rows, start=1):
        check_row(row)
        assert row["step"] == number
        assert [name for name in row if not is_known(name)] == [], "the reference has them all"
    trained = [event for event in ours.events if event["outcome"] == "trained"]
    assert [event["index"] for event in trained] == list(range(128)), "strict order at W = 1"
    assert all(e["admitted_s"] <= e["generated_s"] <= e["scored_s"] <= e["ended_s"] for e in trained)
    events = Journal.read(ours.folder / "journal" / JOURNAL)
    places = {
        (type(event), event.step): place for place, event in enumerate(events) if isinstance(event, Taken | Trained)
    }
    ahead = [places[Taken, step + 1] < places[Trained, step] for step in range(7)]
    assert sum(ahead) >= 4, "most batches are taken while the step before trains"
    trace = json.loads((ours.folder / "trace.json").read_text())["traceEvents"]
    names = {"generate", "train", "publish", "fetch", "swap", "score", "wait for batch"}
    assert {span["name"] for span in trace if span["ph"] == "X"} >= names
    rollouts = list(read_rollouts(ours.folder / "rollouts.jsonl.zst"))
    assert len(rollouts) == 8 * 4 and all(rollout["prompt"].endswith("=") for rollout in rollouts)
    assert "<svg" in (ours.folder / "report.html").read_text()
    assert (ours.folder / "checkpoints" / "step-000008" / "model.safetensors").exists()
    assert list((ours.folder / "tensorboard").iterdir())
    assert not (ours.folder / "tmp").exists()


def test_two_hosts_two_ranks_and_two_replicas_train(tmp_path: Path, tiny_model: Path) -> None:
    words = [
        f"model.path={tiny_model}", "job.kind=process", "learner.ranks=2", "policy.replicas=2", "steps=4", *TINY,
        "optimizer.lr=0.001",
    ]  # fmt: skip
    ours = run(tmp_path, words, timeout_s=240)
    assert ours.code == 0, ours.output
    assert ours.summary["steps"] == 4
    assert ours.summary["staleness/max"] <= 2
    assert {event["replica"] for event in ours.events} == {"policy_0", "policy_1"}
    assert max(row["mismatch/logprob_diff_max"] for row in ours.rows[:1]) < 1e-3, "both replicas serve the same weights"


def test_a_slowed_replica_is_given_less_and_does_not_set_the_pace(tmp_path: Path, tiny_model: Path) -> None:
    """One of two replicas is stopped four fifths of the time."""
    folder = tmp_path / "run"
    words = [
        f"model.path={tiny_model}", *TINY[:1], "groups_per_step=16", "group_size=4", "eval.num_prompts=0", "steps=40",
        "policy.replicas=2", "optimizer.lr=0.001", f"run.dir={folder}",
    ]  # fmt: skip
    process = start(tmp_path, words)
    wait_for_steps(folder, 1, process)
    slowed, ended = processes_of(folder)["policy_1-0"], threading.Event()
    slowing = threading.Thread(target=stop_and_go, args=(slowed, ended))
    slowing.start()
    try:
        ours = finish(process, folder, timeout_s=200)
    finally:
        ended.set()
        slowing.join()
    assert ours.code == 0, ours.output
    assert ours.summary["staleness/max"] <= 2
    made = Counter(event["replica"] for event in ours.events if event["outcome"] == "trained")
    assert made["policy_1"] > 0, "each at its own version, and none forgotten"
    assert made["policy_0"] > 1.3 * made["policy_1"]


def stop_and_go(pid: int, ended: threading.Event) -> None:
    """Let a process run only a fifth of the time, until told otherwise or it has ended."""
    try:
        while not ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            ended.wait(0.2)
            os.kill(pid, signal.SIGCONT)
            ended.wait(0.05)
    except ProcessLookupError:
        pass


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tensor_parallel_learner_and_engine_train_and_agree(tmp_path: Path) -> None:
    """Two ranks each, cut differently: what is sampled is what is trained, with the weights of each step."""
    model, reward = make_model(tmp_path / "model", "qwen3_wide"), tmp_path / "reward.py"
    reward.write_text("def score(completion):\n    return sum(map(ord, completion)) % 7 / 7\n")
    words = [
        f"model.path={model}", "learner.ranks=2", "learner.tensor_parallel=2", "policy.tensor_parallel=2", "steps=3",
        *TINY, "optimizer.lr=0.001", "async.max_staleness=0", "weights.verify=full", f"reward={reward}:score",
        "run.start_timeout_s=450",
    ]  # fmt: skip
    ours = run(tmp_path, words, timeout_s=580)
    assert ours.code == 0, ours.output
    assert ours.summary["steps"] == 3
    for row in ours.rows:
        assert row["mismatch/logprob_diff_max"] < 1e-4
        assert row["grad_norm"] > 0
    versions = {event["index"] // 8: event["versions"] for event in ours.events if event["outcome"] == "trained"}
    assert versions == {step: [step, step] for step in range(3)}, "each step was sampled with the weights of its own"
    assert processes_of(ours.folder) == {}
