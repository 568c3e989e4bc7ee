"""The environment that TRL runs in: made once from requirements/trl.lock, kept in the user's cache, apart from ours."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_async.apps.bench.runs import run_process
from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.paths import cache_dir, new_folder

ROOT = Path(__file__).resolve().parents[3]
"""The checkout; what is installed without one has neither locks nor scripts."""
LOCK, TORCH = ROOT / "requirements" / "trl.lock", ROOT / "requirements" / "cpu-torch.txt"
TORCH_INDEX = "TORCH_CPU_INDEX"
"""Environment variable with an index of torch's CPU builds, asked where pip does not find them elsewhere (Makefile)."""
PIP_ENVIRONMENT = {"PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def trl_python(log: Path) -> Path:
    """The Python of the environment, which is made first if need be (a minute or two; pip's output goes to `log`)."""
    if not (LOCK.is_file() and TORCH.is_file()):
        raise ConfigError(f"bench trl needs {LOCK.name} and {TORCH.name} of a checkout; {ROOT} is none: clone one.")
    folder = cache_dir() / f"trl-{fingerprint(LOCK.read_text(), TORCH.read_text())}"
    if not folder.is_dir():
        print(f"making {folder} from {LOCK.name} (a minute or two).", flush=True)
        with new_folder(folder) as partial:
            install(partial, log)
    return folder / "bin" / "python"


def fingerprint(lock: str, torch: str) -> str:
    """Short hash of what decides the environment: pins and Python's version; comments do not count."""
    pins = [line.strip() for line in (lock + "\n" + torch).splitlines() if line.strip() and line.strip()[0] != "#"]
    return hashlib.sha256(repr((sys.version_info[:2], sorted(pins))).encode()).hexdigest()[:12]


def install(folder: Path, log: Path) -> None:
    """Make the environment in an empty folder. Raises ForgeError naming what could not be installed."""
    run_process([sys.executable, "-m", "venv", str(folder)], log, {})
    pin, index = TORCH.read_text().strip(), os.environ.get(TORCH_INDEX, "")
    try:
        _pip(folder, ["--retries", "2", pin], log)
    except ForgeError:
        if not index:
            raise
        _pip(folder, ["--retries", "2", "--index-url", index, pin], log)
    _pip(folder, ["--requirement", str(LOCK)], log)


def _pip(folder: Path, arguments: Sequence[str], log: Path) -> None:
    """Install without resolving: the lock is complete."""
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-deps", *arguments]
    run_process(command, log, PIP_ENVIRONMENT)
