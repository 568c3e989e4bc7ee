"""The README's commands for a user's own data and reward, and for talking to the run, as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import TINY, environment, finish, start

README = Path(__file__).parents[2] / "README.md"


def reward_of_the_readme() -> str:
    """The Python block that the README calls my.py."""
    found = re.search(r"```python\n(# my\.py\n.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return found.group(1)


@pytest.mark.stack
@pytest.mark.timeout(240)
def test_own_data_and_reward_train_and_the_run_answers(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "my.py").write_text(reward_of_the_readme())
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check = [sys.executable, "-m", "forge_async.apps.check", "reward", "my.py:score", "--prompts", "data.jsonl"]
    done = subprocess.run(check, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

    words = ["prompts=data.jsonl", "reward=my.py:score", f"model.path={tiny_model}", *TINY[1:], "steps=2"]
    folder = tmp_path / "runs" / "mine"
    run = finish(start(tmp_path, [*words, f"run.dir={folder}"]), folder)
    assert run.code == 0, run.output
    assert run.summary["steps"] == 2
    assert {event["prompt_id"].split(":")[0] for event in run.events} == {"data"}

    ask = [sys.executable, "-m", "forge_async.apps.generate", "runs/latest", "3+1="]
    done = subprocess.run(ask, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.stack
@pytest.mark.timeout(120)
def test_a_folder_is_compared_with_transformers(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "forge_async.apps.model", "check", str(tiny_model)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok: largest difference"), done.stdout


@pytest.mark.stack
@pytest.mark.timeout(120)
def test_a_warm_start_from_demonstrations(tmp_path: Path, tiny_model: Path) -> None:
    lines = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(40)]
    (tmp_path / "demonstrations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["sft.data=demonstrations.jsonl", f"model.path={tiny_model}", "sft.output=folder", "sft.steps=3"]
    command = [sys.executable, "-m", "forge_async.apps.sft", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "folder").iterdir()}
