"""`pip install .` in an empty environment: the core, nothing heavy. Needs the package index: marked long."""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
USE = """
import sys
import forge_async.config.root, forge_async.core.records
from forge_async.core.packages import require
heavy = {"torch", "monarch", "vllm", "torchtitan", "torchstore"} & set(sys.modules)
assert not heavy, heavy
try:
    require("torchstore", feature="the weight store")
except Exception as error:
    print(error)
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_light_core_installs_alone_and_names_what_it_lacks(tmp_path):
    source = tmp_path / "source"  # a copy: a build leaves files in its folder
    shutil.copytree(ROOT / "forge_async", source / "forge_async", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", str(source)], check=True, timeout=500)
    done = subprocess.run([python, "-c", USE], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "pip install --no-deps torchstore==0.1.2 pygtrie" in done.stdout
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout
    assert "torch" not in listed
