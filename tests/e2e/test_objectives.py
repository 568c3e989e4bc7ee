"""A whole run with an objective of the user's own, other terms beside it, and another correction."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.runs import TINY, run

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

MY_LOSS = """
def my_loss(inputs, settings):
    log_ratio = (inputs.logprobs - inputs.anchor_logprobs) * inputs.mask
    return -log_ratio.exp() * inputs.advantages + settings.clip_high * log_ratio.square()


def mistaken(inputs):
    return inputs.logprobs
"""


def test_a_users_objective_with_a_divergence_trains_and_is_measured(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_LOSS)
    # The entropy bonus moves the weights also where every reward of this small batch is the same.
    words = ["objective.name=mine.py:my_loss", "objective.kl_weight=0.01", "objective.entropy_weight=0.01"]
    words.append("optimizer.warmup_steps=0")
    finished = run(tmp_path, [*TINY, "steps=3", f"model.path={tiny_model}", "async.correction=vtrace", *words])
    assert finished.code == 0, finished.output
    last = finished.rows[-1]
    assert last["loss"] == pytest.approx(last["loss/objective"] + last["loss/kl"] + last["loss/entropy"])
    assert last["reference/kl"] > 0 and last["policy/entropy"] > 0
    assert 0 < last["ratio/effective_fraction"] <= 1 and last["ratio/max"] <= 1


def test_ppo_trains_its_values_over_several_updates(tmp_path: Path, tiny_model: Path) -> None:
    words = ["objective.name=ppo", "async.correction=decoupled", "learner.updates_per_batch=2"]
    finished = run(tmp_path, [*TINY, "steps=3", f"model.path={tiny_model}", *words])
    assert finished.code == 0, finished.output
    assert all(row["staleness/extra_updates"] == 1 and "value/explained_fraction" in row for row in finished.rows)


def test_an_objective_that_cannot_be_called_ends_the_run_with_one_sentence(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "mine.py").write_text(MY_LOSS)
    finished = run(tmp_path, [*TINY, "steps=3", f"model.path={tiny_model}", "objective.name=mine.py:mistaken"])
    assert finished.code == 2
    assert "mine.py:mistaken must take two arguments" in finished.output.splitlines()[-1]


def test_reference_and_teacher_are_served_by_processes_of_their_own(tmp_path: Path, tiny_model: Path) -> None:
    words = ["objective.kl_weight=0.01", "objective.kl_place=reward", f"objective.teacher={tiny_model}"]
    # The entropy bonus moves the weights also where every reward of this small batch is the same.
    words += ["reference.placement=service", "objective.entropy_weight=0.01", "optimizer.warmup_steps=0"]
    finished = run(tmp_path, [*TINY, "steps=3", f"model.path={tiny_model}", *words])
    assert finished.code == 0, finished.output
    first, *_, last = finished.rows
    assert first["reference/kl"] < 1e-9 and last["reference/kl"] > 1e-9
    assert last["teacher/kl"] == pytest.approx(last["reference/kl"]), "the teacher is the initial model, too"
    assert 0 < first["reference/busy_fraction"] <= 1 and first["cpu_s/reference"] > 0
