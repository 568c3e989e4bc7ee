"""Short runs whose replicas are quantised: the learner learns from them, and what is too rough ends the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.runs import TINY, parity_reward, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_version_is_compared_by_its_probe(tmp_path: Path, tiny_model: Path, ranks: int) -> None:
    words = [f"model.path={tiny_model}", *TINY, "steps=5", "async.max_staleness=1", "policy.quantize=int8"]
    words += ["weights.verify=full", "optimizer.lr=0.003", f"reward={parity_reward(tmp_path)}"]
    words += ["sampling.temperature=0.7"]  # what is sampled has it, the probe has not
    ours = run(tmp_path, [*words, f"learner.ranks={ranks}", "groups_per_step=8"], 200)
    assert ours.code == 0, ours.output
    gaps = [row["weights/probe_gap"] for row in ours.rows if "weights/probe_gap" in row]
    assert all(1e-5 < gap < 0.5 for gap in gaps) and len(set(gaps)) > 1, gaps
    assert ours.rows[0]["mismatch/logprob_diff_max"] > 1e-3, "what is sampled is not the learner's policy"
    assert all(row["grad_norm"] > 0 for row in ours.rows)
    assert ours.rows[-1]["memory/sync_peak_bytes/policy_0"] > 0, "a version is quantised beside the one that is served"
    assert "warning" not in ours.output


def test_a_replica_too_far_from_the_learner_ends_the_run_before_it_serves(tmp_path: Path, tiny_model: Path) -> None:
    words = [f"model.path={tiny_model}", *TINY, "steps=2", "policy.quantize=int8", "weights.probe_limit=0.00001"]
    ours = run(tmp_path, words)
    assert ours.code == 1, ours.output
    last = ours.output.splitlines()[-1]
    assert "policy_0 pulled policy@0.0" in last and "weights.probe_limit=1e-05; it must not serve" in last
    assert (ours.summary["status"], ours.rows) == ("failed", [])
