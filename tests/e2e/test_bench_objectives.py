"""`bench objectives` with real engine and learner: runs on a used engine are those on a new one, and S is the age."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest
from e2e.runs import environment

from tests.models import make_model

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(1100)]

REWARD = """
def score(completion, **_):
    return sum(character < "a" for character in completion) / 6
"""
STEPS = 5


def measured(tmp_path: Path, name: str, model: Path, *words: str) -> dict[str, dict]:
    """Finished runs by key."""
    (tmp_path / "reward.py").write_text(REWARD)
    options = ["--folder", name, "--out", f"{name}.json", "--steps", str(STEPS), "--jobs", "1", *words]
    own = [f"model.path={model}", "reward=reward.py:score", "groups_per_step=4", "optimizer.lr=3e-3", "eval.samples=2"]
    command = [sys.executable, "-m", "forge_async.apps.bench", "objectives", *options, *own, "optimizer.warmup_steps=0"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=500)
    logs = "".join(path.read_text()[-2000:] for path in (tmp_path / name).glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return {run["key"]: run for run in json.loads((tmp_path / f"{name}.json").read_text())["runs"]}


def test_runs_repeat_on_an_engine_that_was_used_and_are_as_old_as_asked(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")  # random, so that its answers differ
    many = measured(tmp_path, "many", model, "--only", "staleness", "--rounds", "1")
    few = measured(tmp_path, "few", model, "--only", "pairs", "--pairs", "1")
    assert len(many) == 5 and len(few) == 3 and few.keys() < many.keys()
    for key, run in few.items():
        assert run["rewards"] == many[key]["rewards"], run["words"]
        assert run["held_out_sampled"] == many[key]["held_out_sampled"] > 0
    by_bound = {int(run["words"][0].partition("=")[2]): run for run in many.values()}
    for bound, run in by_bound.items():
        assert run["staleness_mean"] == fmean(min(step, bound) for step in range(STEPS))
        assert len(run["rewards"]) == STEPS and min(run["rewards"]) > 0
    assert len({tuple(run["rewards"]) for run in by_bound.values()}) >= 4, "S changes what is sampled"
    assert by_bound[0]["rewards"][0] == by_bound[2]["rewards"][0], "the first batch is the same"
