"""Whole runs of mixtures of experts: the routing passes through all processes, the experts are spread over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.runs import TINY, run

from forge_async.runtime.model_shape import read_shape
from tests.models import make_model, make_near_ties

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]

MIXTURE = [*TINY, "async.max_staleness=1", "optimizer.warmup_steps=0"]
KEPT = "policy.keep_routing=true"


def test_the_routing_of_the_sampler_reaches_the_learner(tmp_path: Path) -> None:
    """Where experts nearly tie the difference is above 0.1 without it (`tests/contract/test_keep_routing.py`).

    The entropy bonus has all samples trained on, though this model never wins a reward.
    """
    folder = make_near_ties(tmp_path / "ties")
    finished = run(tmp_path, [*MIXTURE, KEPT, "steps=1", "objective.entropy_weight=0.01", f"model.path={folder}"], 400)
    assert finished.code == 0, finished.output
    (row,) = finished.rows
    assert row["tokens/trained"] > 50 and 0 < row["mismatch/logprob_diff_max"] < 1e-5


@pytest.mark.parametrize("how", [KEPT, "policy.tensor_parallel=2"], ids=["one_process_serves", "two_ranks_serve"])
def test_a_mixture_trains_with_its_experts_on_two_ranks(tmp_path: Path, how: str) -> None:
    """With random weights: of the warm start, trained for long, float32 gives sampler and learner log-probabilities
    1.1e-5 apart in the worst of a step's tokens. That it is made, and has learnt: `tests/e2e/test_warm_start.py`."""
    mixture = make_model(tmp_path / "mixture", "qwen3_moe")
    assert read_shape(mixture).num_experts == 8
    reward = tmp_path / "reward.py"  # of which every group has several
    reward.write_text("def score(completion):\n    return sum(map(ord, completion)) % 7 / 7\n")
    words = [
        *MIXTURE, how, "steps=4", f"model.path={mixture}", "learner.ranks=2", "learner.expert_parallel=2",
        "weights.verify=full", f"reward={reward}:score",
    ]  # fmt: skip
    finished = run(tmp_path, words, timeout_s=400)
    assert finished.code == 0, finished.output
    assert len(finished.rows) == 4 and finished.summary["staleness/max"] <= 1
    first = finished.rows[0]
    assert first["mismatch/logprob_diff_max"] < 1e-5 and first["tokens/trained"] > 20
    assert 1 / 8 < first["router/share_max"] < 1 and 0 < first["router/entropy_fraction"] < 1
