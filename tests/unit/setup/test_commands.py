"""The Makefile, what continuous integration runs, and what no tracked file may hold."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MAKEFILE = (ROOT / "Makefile").read_text()
PROMISED = {"help", "setup", "grpo", "test", "test-long", "gpu", "check", "lock", "clean"}
# Put together here, so that this file does not hold what it forbids.
INDEX_HOSTS = [
    ".".join(parts)
    for parts in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("wheels", "vllm", "ai"),
        ("pypi", "nvidia", "com"),
        ("registry", "npmjs", "org"),
        ("anaconda", "org"),
    )
]
OWN_PATHS = re.compile(
    r"(?<![\w./-])/(?:" + "|".join(("work", "root", "tmp", "opt/" + "pypi", "opt/" + "wheels")) + r")(?![\w-])"
)

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))


def make(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def project_files() -> list[Path]:
    """Return what is tracked, or would be by `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def text_lines() -> list[tuple[Path, int, str]]:
    lines = []
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        lines += [(path.relative_to(ROOT), number, line) for number, line in enumerate(text.splitlines(), start=1)]
    return lines


@needs_make
def test_make_alone_lists_every_command_with_one_line():
    listed = dict(re.findall(r"^  make (\S+) +(\S.*)$", make(), flags=re.MULTILINE))
    assert set(listed) == targets()
    assert set(listed) >= PROMISED
    assert make("help") == make()


def test_no_target_is_taken_for_a_file():
    assert set(re.findall(r"^\.PHONY: (\S+)$", MAKEFILE, flags=re.MULTILINE)) == targets()


@needs_make
def test_grpo_and_test_set_up_first():
    grpo = make("--dry-run", "grpo", "ARGS=steps=2")
    assert re.search(r"scripts/setup\.sh.*\n.*-m forge_async\.apps\.grpo steps=2", grpo)
    assert re.search(
        r'scripts/setup\.sh.*\n.*OMP_NUM_THREADS=1 .*-m pytest -m "not long and not gpu"', make("-n", "test")
    )


def test_continuous_integration_runs_the_two_commands_and_nothing_else():
    script = (ROOT / ".ci" / "run").read_text()
    assert "set -euo pipefail" in script
    code = [line for line in script.splitlines() if line and not line.startswith("#")]
    assert code[-2:] == ["make check", "make test"]
    assert len(code) == 4
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_only_package_index_named_is_one_variable_of_the_makefile():
    found = [(str(path), line) for path, _, line in text_lines() if any(host in line for host in INDEX_HOSTS)]
    assert [path for path, _ in found] == ["Makefile"]
    assert found[0][1].startswith("TORCH_CPU_INDEX ?= ")


def test_no_file_holds_a_path_of_the_machine_it_was_written_on():
    found = [f"{path}:{number}: {line.strip()}" for path, number, line in text_lines() if OWN_PATHS.search(line)]
    assert not found, "\n".join(found)
