"""The dials of asynchrony turned together, on the real stack."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from e2e.runs import TINY, parity_reward, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def test_all_dials_at_once_keep_the_laws(tmp_path: Path, tiny_model: Path) -> None:
    words = [
        f"model.path={tiny_model}", *TINY[:-1], "steps=8", "eval.num_prompts=10", "eval.every_steps=3",
        "policy.replicas=2", "async.max_staleness=auto", "async.max_staleness_cap=4", "async.fresh_fraction=0.25",
        "async.swap=abort_resume", "policy.concurrency=auto", "advantage.zero_variance=refill", "optimizer.lr=0.001",
        f"reward={parity_reward(tmp_path)}", "sampling.temperature=1.5",
    ]  # fmt: skip
    ours = run(tmp_path, words, timeout_s=240)
    assert ours.code == 0, ours.output
    assert ours.summary["steps"] == 8
    assert ours.summary["staleness/max"] <= ours.summary["staleness/bound"] == 4
    ends = Counter(event["outcome"] for event in ours.events)
    assert ends["trained"] == 8 * 8
    assert ends["filtered"] == ours.summary["groups/filtered"] > 0, "completions are often alike"
    assert len({event["index"] for event in ours.events}) == len(ours.events) == ours.summary["groups/admitted"]
    assert all(row["reward/zero_variance_fraction"] == 0 for row in ours.rows), "every place went to a useful group"
    for number in range(8):
        batch = [event for event in ours.events if event["outcome"] == "trained"][8 * number : 8 * number + 8]
        assert sum(event["versions"][0] == number for event in batch) >= 2, "a quarter of each batch is fresh"
    assert {found["step"] for found in ours.summary["eval/all"]} == {0, 3, 6, 8}
    assert {"policy/discarded_tokens", "policy/recomputed_tokens", "staleness/bound"} <= ours.rows[-1].keys()


@pytest.mark.long
def test_a_run_with_nothing_to_learn_from_ends_by_name(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "same.py").write_text("def score(completion: str) -> float:\n    return 1.0\n")
    words = [f"model.path={tiny_model}", *TINY, "steps=50", "reward=same.py:score", "async.max_filtered_batches=3"]
    ours = run(tmp_path, words)
    assert ours.code == 1
    assert "The last 3 batches had nothing to learn from" in ours.output.splitlines()[-1]
    assert ours.summary["status"] == "failed"
