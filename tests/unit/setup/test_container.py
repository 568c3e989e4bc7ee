"""The Containerfile and what COPY leaves out. That it builds and trains is shown by hand: CONTRIBUTING.md says when."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Instruction = tuple[str, str]


def instructions() -> list[Instruction]:
    """(word, rest) of each instruction, continued lines joined, comments left out."""
    lines = [line for line in (ROOT / "Containerfile").read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    parts = [line.partition(" ") for line in joined.splitlines() if line]
    return [(word, " ".join(rest.split())) for word, _, rest in parts]


def rest_of(word: str) -> list[str]:
    return [rest for each, rest in instructions() if each == word]


def copied_before_set_up() -> list[str]:
    """Sources of COPY ahead of `make setup`, in order."""
    before = instructions()[: instructions().index(("RUN", "make setup && rm -rf ~/.cache/pip"))]
    sources = [source for word, rest in before if word == "COPY" for source in rest.split()[:-1]]
    return [source for source in sources if not source.startswith("--")]


def ignored(path: str) -> bool:
    """Does .dockerignore leave this path out? Its patterns are anchored at the root, and `**/` is any depth."""
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    parts = path.split("/")
    anchored = ["/".join(parts[: number + 1]) for number in range(len(parts))]
    return any(
        fnmatch.fnmatchcase(each, pattern.removeprefix("**/"))
        for pattern in patterns
        for each in (parts if pattern.startswith("**/") else anchored)
    )


def left_out(folder: str, names: list[str]) -> set[str]:
    """The names of a folder that COPY leaves out, as `shutil.copytree` asks for them."""
    return {name for name in names if ignored(str((Path(folder) / name).relative_to(ROOT)))}


def fingerprint_in(root: Path) -> str:
    """What set-up's stamp would hold, with the project's files in `root`."""
    code = "import sys, setup; print(setup.expected_fingerprint(setup.parse(['--venv', sys.argv[1]])))"
    command = [sys.executable, "-c", code, str(root / ".venv")]
    return subprocess.run(command, cwd=root / "scripts", capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("path", [".git/config", ".venv/bin/python", ".venv-cuda/lib", "runs/grpo-1/summary.json"])
def test_the_image_gets_no_environment_no_history_and_no_runs(path: str) -> None:
    assert ignored(path)


def test_the_image_leaves_out_all_that_git_does() -> None:
    for pattern in (ROOT / ".gitignore").read_text().split():
        name = pattern.strip("/").replace("*", "name")
        assert ignored(name) and ignored(f"{name}/file"), pattern
        assert pattern.startswith("/") or "runs" in pattern or "venv" in pattern or ignored(f"tests/unit/{name}"), (
            pattern
        )


def test_the_image_gets_every_tracked_kind_of_file() -> None:
    for path in (
        "forge_async/runtime/launch.py",
        "forge_async/config/shipped/tiny_cpu.yaml",
        "configs",
        "tests/e2e/runs.py",
    ):
        assert (ROOT / path).exists() and not ignored(path)


def test_the_whole_tree_changes_nothing_of_what_set_up_was_made_from(tmp_path: Path) -> None:
    """Else the container's command would find another fingerprint than the build's, and set up anew at each start."""
    for source in copied_before_set_up():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / source, tmp_path / source) if (ROOT / source).is_dir() else shutil.copy(
            ROOT / source, tmp_path / source
        )
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())
    needed = [project["project"]["readme"], *project["project"]["license-files"], "Makefile", "scripts/setup.sh"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "forge_async.__version__"
    assert all((tmp_path / name).is_file() for name in [*needed, "forge_async/__init__.py"])
    at_build = fingerprint_in(tmp_path)
    shutil.copytree(ROOT, tmp_path, dirs_exist_ok=True, symlinks=True, ignore=left_out)
    assert (tmp_path / "forge_async" / "apps" / "grpo.py").is_file() and not (tmp_path / ".git").exists()
    assert fingerprint_in(tmp_path) == at_build


def test_the_user_owns_the_folder_before_it_becomes_the_working_directory() -> None:
    words = instructions()
    user, workdir = words.index(("USER", "forge")), words.index(("WORKDIR", "/home/forge/forge_async"))
    made = words.index(("RUN", "mkdir --parents /home/forge/forge_async/runs"))
    assert user < made < workdir
    assert all("--chown=forge" in rest for rest in rest_of("COPY"))


def test_signals_reach_make_and_the_run_as_from_a_terminal() -> None:
    assert rest_of("ENTRYPOINT") == ['["tini", "-g", "--"]']
    assert rest_of("STOPSIGNAL") == ["SIGINT"]
    assert rest_of("CMD") == ['["make", "grpo"]']
    assert re.search(r"\btini\b", rest_of("RUN")[0])
