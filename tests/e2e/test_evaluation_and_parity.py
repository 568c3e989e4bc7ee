"""A run that cannot learn: evaluated on its way, in parity from start to end; then apps.eval and apps.doctor on it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.runs import descendants, environment, nothing_left, run

from tests.models import make_model

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def call(cwd: Path, app: str, *words: str) -> str:
    """Standard output of an application that ends well."""
    command = [sys.executable, "-m", f"forge_async.apps.{app}", *words]
    done = subprocess.run(command, cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


REWARD = """
def score(completion, **_):
    return min(1.0, sum(map(str.isalpha, completion)) / 4)
"""


@pytest.mark.long
def test_a_run_is_evaluated_on_its_way_and_policy_learner_and_transformers_agree(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    model = make_model(tmp_path / "model")  # random, so that its answers differ and some of them score
    words = [
        f"model.path={model}", "task.name=sum", "groups_per_step=8", "group_size=4", "steps=6", "optimizer.lr=0",
        "reward=reward.py:score",
        "eval.every_steps=2", "eval.num_prompts=20", "eval.samples=4", "checkpoint.keep=1", "async.max_staleness=1",
        "advantage.zero_variance=keep",
    ]  # fmt: skip
    ours = run(tmp_path, words)
    assert ours.code == 0, ours.output

    found = ours.summary["eval/all"]
    assert [each["step"] for each in found] == [0, 2, 4, 6]
    for each in found:
        assert 0 < each["low"] <= each["score"] <= each["high"] < 1
        assert 0 < each["pass_at_1"]["mean"] < each["pass_at_4"]["mean"] < 1
        assert each["oldest_version"] <= each["newest_version"] <= 6
    assert len({(each["score"], each["pass_at_4"]["mean"]) for each in found}) == 1, "the same weights and seeds"
    folder = ours.folder / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000006"]
    assert ours.summary["checkpoint/best"] == str(folder / "step-000002") == str((folder / "best").resolve())

    assert all(0 < row["mismatch/logprob_diff_max"] < 1e-4 for row in ours.rows), (
        "at a learning rate of 0 nothing drifts"
    )
    assert ours.rows[0]["mismatch/fresh_logprob_diff_max"] == ours.rows[0]["mismatch/logprob_diff_max"]
    assert "warning" not in ours.output

    printed = call(tmp_path, "eval", str(folder / "best"), "--json", "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["greedy"]["mean"] == pytest.approx(found[1]["score"]), "the run's own task, prompts and settings"
    assert figures["pass_at_4"]["mean"] == pytest.approx(found[1]["pass_at_4"]["mean"], abs=0.05)
    assert [line.split()[0] for line in printed.splitlines()] == ["greedy", "sampled", "pass@1", "pass@4"]

    verdict = call(tmp_path, "doctor", "parity", "task.name=sum", f"model.path={folder / 'best'}").splitlines()[-1]
    assert verdict == "ok: all within 1e-05"


def test_a_doctor_that_is_killed_takes_its_processes_along(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "forge_async.apps.doctor", "parity", "task.name=sum", f"model.path={tiny_model}"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.DEVNULL) as doctor:
        deadline = time.monotonic() + 60
        while not (pids := descendants(doctor.pid)):
            assert doctor.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(1.0)  # long enough for the child to have asked the kernel
        doctor.kill()
    nothing_left(pids)
