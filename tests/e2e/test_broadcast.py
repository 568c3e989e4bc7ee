"""A run whose weights travel by broadcast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.runs import TINY, run

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]


def test_weights_arrive_by_broadcast_while_the_next_step_runs(tmp_path: Path, tiny_model: Path) -> None:
    words = [
        f"model.path={tiny_model}", *TINY, "steps=20", "policy.replicas=2", "learner.ranks=2",
        "weights.transport=broadcast", "weights.verify=full", "weights.delta=never",
    ]  # fmt: skip
    ours = run(tmp_path, words, timeout_s=350)
    assert ours.code == 0, ours.output
    assert ours.summary["status"] == "completed"
    trace = json.loads((ours.folder / "trace.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    sent = [span for span in spans if span["name"] == "broadcast"]
    assert all(span["args"]["readers"] == 2 for span in sent), "both replicas take part"
    assert len(sent) >= 2 * 16, "each rank sends its part of nearly every version after the first"
    trained = [span for span in spans if span["name"] == "train"]
    assert any(_overlap(span, step) for span in sent for step in trained), "the next step does not wait for it"
    for replica in ("policy_0", "policy_1"):
        assert f"weights to {replica}: broadcast, " in ours.output, "what brought them is printed"


def _overlap(one: dict, other: dict) -> bool:
    return one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
