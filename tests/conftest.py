"""Fixtures that several tiers share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine takes longer over an example: how fast something is belongs in `bench`, not in a test.
settings.register_profile("without-deadlines", deadline=None)
settings.load_profile("without-deadlines")


WRITTEN_BY_TOOLS = {".hypothesis", ".pytest_cache", "__pycache__"}


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What libraries, and processes that are killed, leave in the temporary folder goes where pytest clears up."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
        patch.setattr(tempfile, "tempdir", None)  # so that it is looked up anew
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_where_tests_run() -> Iterator[None]:
    """A test writes to its temporary folder, and not to the one that pytest was called in."""
    before = {path.name for path in Path.cwd().iterdir()}
    yield
    left = {path.name for path in Path.cwd().iterdir()} - before - WRITTEN_BY_TOOLS
    assert not left, f"left in {Path.cwd()}: {', '.join(sorted(left))}"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows how answers of the task `sum` look, trained here by apps.sft from random weights."""
    from forge_async.backends.tiny_model import TinyShape, to_json

    folder = tmp_path_factory.mktemp("tiny-model")
    start, trained = folder / "random", folder / "trained"
    shape = TinyShape(dim=64, layers=2, heads=2, kv_heads=1, ffn=192)
    words = [f"model.path={start}", "task.name=sum", "sft.steps=250", "sft.lr=5e-3", f"sft.output={trained}"]
    for command in (["forge_async.backends.tiny_model", str(start), to_json(shape)], ["forge_async.apps.sft", *words]):
        subprocess.run(
            [sys.executable, "-m", *command],
            check=True, timeout=170, cwd=folder, capture_output=True, env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
    return trained
