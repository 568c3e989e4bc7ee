"""The long run's script: what it asks, what it pays for, and that its settings are those of today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from forge_async.config import load

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "smollm2_sums.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("smollm2_sums", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sum_is_asked_once_and_none_that_the_prompts_show(script):
    rows = script.prompts()
    asked = [row["messages"][-1]["content"] for row in rows]
    assert len(set(asked)) == len(asked) == 20 * 20 - len(script.SHOWN)
    assert not {question for question, _ in script.SHOWN} & set(asked)
    for question, row in zip(asked, rows, strict=True):
        assert script.score(f" {eval(question.rstrip(' ='))}\n", row["answer"]) == 1.0
        assert script.score(f"{question} {row['answer']}", row["answer"]) == 0.0


def test_it_hands_the_run_its_prompts_and_settings_that_hold_and_the_users_keys_last(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["smollm2_sums.py", "steps=3"])
    given = []
    monkeypatch.setattr("forge_async.apps.grpo.main", lambda words: given.extend(words) or 7)
    assert script.main() == 7
    config, _ = load(given)
    assert config.root.steps == 3
    assert [json.loads(line) for line in Path(config.root.prompts).read_text().splitlines()] == script.prompts()
    assert config.root.reward == f"{SCRIPT}:score"
