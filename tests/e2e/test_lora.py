"""A short run with adapters on the real stack: they travel alone, and what is saved is read as a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.runs import TINY, finish, run, start

from forge_async.observe.rollout_log import read_rollouts

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.mark.long
@pytest.mark.parametrize("swap", ["keep_kv", "drain"])
def test_adapters_travel_alone_and_their_checkpoint_is_evaluated(tmp_path: Path, tiny_model: Path, swap: str) -> None:
    words = [f"model.path={tiny_model}", *TINY, "steps=4", "async.max_staleness=1", "learner.lora.rank=8"]
    words += [f"async.swap={swap}", "weights.verify=full", "optimizer.lr=0.003", "objective.kl_weight=0.01"]
    ours = run(tmp_path, words, 240)
    assert ours.code == 0, ours.output
    if swap == "drain":
        made_by = [row["versions"] for row in read_rollouts(ours.folder / "rollouts.jsonl.zst")]
        assert all(oldest == newest for oldest, newest in made_by)
    whole = (tiny_model / "model.safetensors").stat().st_size
    sizes = [row["weights/bytes"] for row in ours.rows]
    assert set(sizes) <= {0, sizes[-1]}
    assert 0 < sizes[-1] < whole / 4, "the tiny model is not much wider than its adapters"
    assert ours.rows[0]["mismatch/logprob_diff_max"] < 1e-4
    assert ours.summary["staleness/max"] <= 1
    folder = ours.folder / "checkpoints" / "step-000004"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    assert not (folder / "model.safetensors").exists()
    held = sum(path.stat().st_size for path in (folder / "state").iterdir())
    assert held < whole, "three times the adapters, of which this model is not much wider, and no copy of it"
    words = [str(ours.folder), "eval.num_prompts=8", "--json", "found.json"]
    scored = finish(start(tmp_path, words, "eval"), tmp_path)
    assert scored.code == 0, scored.output
    assert json.loads((tmp_path / "found.json").read_text())["step"] == 4
    longer = finish(start(tmp_path, [f"run.dir={ours.folder}", "run.resume=true", "steps=6"]), ours.folder)
    assert longer.code == 0, longer.output
    assert [row["step"] for row in longer.rows] == list(range(1, 7))
    assert longer.summary["resumed_at"] == [4]
