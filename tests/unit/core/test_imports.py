"""What importing loads: the package nothing heavy, the controller's modules Monarch and no more."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "torchtitan", "torchstore", "transformers", "reasoning_gym"}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("forge_async", HEAVY | {"monarch", "omegaconf"}),
        ("forge_async.apps.grpo", HEAVY | {"monarch"}),
        ("forge_async.runtime.launch", HEAVY),
    ],
)
def test_importing_loads_nothing_heavy(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*(set({sorted(forbidden)}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []
