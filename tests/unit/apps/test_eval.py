"""apps.eval with a fake engine and the real rewards; the real engine is in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_folders import fake_model
from fakes import FakeEngine

from forge_async.apps import eval as app
from forge_async.apps.generate import find_model
from forge_async.config import Config

SUM = ["task.name=sum", "eval.num_prompts=6"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine()
    monkeypatch.setattr(app, "_build_engine", lambda model, settings: fake)
    return fake


def make_run(folder: Path, **values) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(Config.of(values).to_yaml())
    for step in (5, 10):
        fake_model(folder / "checkpoints" / f"step-{step:06d}")
    return folder


def test_a_folder_is_evaluated_greedily_and_by_samples(engine: FakeEngine, tmp_path: Path, capsys) -> None:
    words = [str(fake_model(tmp_path / "model")), *SUM, "eval.samples=4", "eval.k=[1,2]", "--json", str(tmp_path / "f")]
    assert app.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["greedy", "sampled", "pass@1", "pass@2"]
    assert "6 held-out prompts of sum, exact match" in lines[0] and "4 samples a prompt at temperature 1" in lines[2]
    written = json.loads((tmp_path / "f").read_text())
    assert (written["num_prompts"], written["num_samples"], written["task"]) == (6, 4, "sum")
    for figure in ("greedy", "sampled", "pass_at_1", "pass_at_2"):
        assert 0 <= written[figure]["low"] <= written[figure]["mean"] <= written[figure]["high"] <= 1
    assert len([1 for call, _ in engine.log if call == "add"]) == 12


def test_greedy_alone_is_the_default(engine: FakeEngine, tmp_path: Path, capsys) -> None:
    assert app.main([str(fake_model(tmp_path)), *SUM]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_runs_own_settings_hold_for_it_and_for_its_checkpoints(tmp_path: Path) -> None:
    values = {"task.name": "sum", "eval.samples": 2, "run.dir": str(tmp_path), "model.path": "/gone", "seed": 7}
    run = make_run(tmp_path / "run", **values)
    for text in (run, run / "checkpoints" / "step-000005"):
        model = find_model(str(text))
        config = app.configure(model, [], ["eval.samples=3"])
        assert (config.task.name, config.root.seed, config.eval.samples) == ("sum", 7, 3)
        assert config.model.path == str(model.folder)
    assert find_model(str(run)).step == 10


def test_the_engine_is_one_process_and_says_so_where_training_has_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    built = []
    monkeypatch.setattr(app, "_build_engine", lambda model, settings: built.append(settings) or FakeEngine())
    assert app.main([str(make_run(tmp_path / "run")), *SUM, "policy.tensor_parallel=2"]) == 0
    assert "policy.tensor_parallel=2 is for training: here one process" in capsys.readouterr().err
    assert [settings.tensor_parallel for settings in built] == [1]


def test_what_cannot_be_evaluated_is_one_sentence_and_exit_2(tmp_path: Path, capsys) -> None:
    model = str(fake_model(tmp_path / "model"))
    for words in (
        [],
        ["/nowhere"],
        [model, "--fast"],
        [model, "eval.sample=2"],
        [model, "eval.num_prompts=0"],
        [model, "eval.k=[8]"],
        [model, "task.held_out_fraction=0"],
        [model, "task.name=nonsense"],
        [model, "--config", "/nowhere.yaml"],
    ):
        assert app.main(words) == 2, words
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
