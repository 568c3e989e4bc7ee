"""Law 3: at S = 0 a run is bit for bit the synchronous loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.runs import environment, parity_reward, run

STEPS = 10


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_a_run_without_staleness_equals_the_independent_loop_bit_for_bit(tmp_path: Path, tiny_model: Path) -> None:
    words = [
        f"model.path={tiny_model}", "async.max_staleness=0", f"steps={STEPS}", "groups_per_step=16", "group_size=8",
        "eval.num_prompts=0", "optimizer.lr=0.002", "seed=3", "sampling.temperature=1.5",
        f"reward={parity_reward(tmp_path)}",
    ]  # fmt: skip
    ours = run(tmp_path, words)
    assert ours.code == 0, ours.output
    assert [row["staleness/max"] for row in ours.rows] == [0] * STEPS
    assert all(row["tokens/trained"] > 0 for row in ours.rows), "every step changes the weights"
    out = tmp_path / "reference.json"
    script = Path(__file__).with_name("reference_loop.py")
    subprocess.run(
        [sys.executable, str(script), str(ours.folder / "config.yaml"), str(out)],
        check=True, timeout=150, env=environment(tmp_path), capture_output=True,
    )  # fmt: skip
    assert json.loads(out.read_text())[-1] == ours.summary["weights_sha256"]
