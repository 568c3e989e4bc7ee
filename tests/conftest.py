"""Fixtures that several tiers share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that half knows the task `sum`, trained here by apps.sft from random weights."""
    from models import tiny_qwen3

    folder = tmp_path_factory.mktemp("tiny-model")
    start, trained = folder / "random", folder / "trained"
    tiny_qwen3(start)
    words = [f"model.path={start}", "task.name=sum", "sft.steps=250", "sft.lr=5e-3", f"sft.output={trained}"]
    subprocess.run(
        [sys.executable, "-m", "forge_async.apps.sft", *words],
        check=True, timeout=170, cwd=folder, capture_output=True, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    return trained
