"""apps.doctor: its command line, table and verdict. The comparison on the real stack is in tests/e2e."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from fake_folders import SMOLLM2, fake_model

from forge_async.apps import doctor
from forge_async.apps.doctor import default_tolerance, plan_of
from forge_async.backends import sampled_parity
from forge_async.backends.sampled_parity import Difference, compare, differences
from forge_async.config import Config
from forge_async.core.errors import ForgeError
from forge_async.runtime.model_shape import read_shape


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, largest: float, *words: str) -> int:
    found = [Difference(first="policy", second="learner", largest=largest, mean=1e-7)]
    monkeypatch.setattr(doctor, "compare", lambda plan: (found, 99))
    return doctor.main(["parity", f"model.path={fake_model(folder)}", *words])


def test_a_quantised_engine_is_compared_without_it_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    assert run_with(monkeypatch, tmp_path, 4e-6, "policy.quantize=int8") == 0
    assert "policy.quantize=int8 is left out here" in capsys.readouterr().err
    config = Config().replace({"task.name": "sum", "policy.quantize": "int8"})
    assert plan_of(config, fake_model(tmp_path / "b")).policy.quantize == "none"


@pytest.mark.parametrize(
    ("largest", "words", "code", "verdict"),
    [
        (4e-6, [], 0, "ok: all within 1e-05"),
        (4e-5, [], 1, "NOT OK: policy - learner beyond 1e-05"),
        (4e-5, ["--tolerance", "1e-4"], 0, "ok: all within 0.0001"),
        (float("nan"), [], 1, "NOT OK"),
        (0.1, ["policy.dtype=bfloat16"], 0, "ok: all within 0.2"),
    ],
)
def test_the_verdict_follows_the_largest_difference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys, largest: float, words: list[str], code: int, verdict: str
) -> None:
    assert run_with(monkeypatch, tmp_path, largest, *words) == code
    out = capsys.readouterr().out
    assert "log-probabilities of 99 sampled tokens" in out
    assert out.splitlines()[-1].startswith(verdict)


def test_models_that_training_spreads_over_ranks_are_compared_in_one_process_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    ranks = {"policy.tensor_parallel": 2, "learner.ranks": 4}
    words = [f"{key}={number}" for key, number in ranks.items()]
    assert run_with(monkeypatch, tmp_path / "a", 1e-6, *words) == 0
    said = "policy.tensor_parallel=2 and learner.ranks=4 are for training: here one process holds the whole model"
    assert said in capsys.readouterr().err
    asked = Config().replace({**ranks, "learner.tensor_parallel": 2, "task.name": "sum"})
    plan = plan_of(asked, tmp_path / "a")
    assert (plan.policy.tensor_parallel, plan.learner.ranks, plan.learner.tensor_parallel) == (1, 1, 1)
    assert run_with(monkeypatch, tmp_path / "b", 1e-6) == 0
    assert "for training" not in capsys.readouterr().err


def test_larger_models_may_differ_by_more(tmp_path: Path) -> None:
    tiny, large = (read_shape(folder) for folder in (fake_model(tmp_path / "a"), fake_model(tmp_path / "b", SMOLLM2)))
    assert default_tolerance(Config(), tiny.num_parameters) == 1e-5
    assert default_tolerance(Config(), large.num_parameters) == 1e-4


def test_the_plan_samples_the_tasks_prompts_as_training_does(tmp_path: Path) -> None:
    config = Config().replace(
        {"sampling.temperature": 0.7, "sampling.top_p": 0.9, "sampling.max_new_tokens": 30, "task.name": "sum"}
    )
    plan = plan_of(config, fake_model(tmp_path))
    assert len(plan.prompts) == 8
    assert (plan.sampling.top_p, plan.sampling.top_k) == (1.0, 0), "a kept set is the sampler's own"
    assert (plan.sampling.temperature, plan.sampling.max_new_tokens, plan.sampling.stop_token_ids) == (0.7, 16, (2,))


def test_models_are_compared_over_the_whole_vocabulary(tmp_path: Path) -> None:
    narrow = Config().replace({"task.name": "sum", "sampling.top_p": 0.9, "sampling.top_k": 20})
    assert not plan_of(narrow, fake_model(tmp_path)).sampling.leaves_out


def test_every_pair_is_compared_and_what_is_not_a_number_shows() -> None:
    found = differences({"a": np.array([1.0, 2.0]), "b": np.array([1.5, 2.0]), "c": np.array([np.nan, 2.0])})
    assert [(each.first, each.second) for each in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert (found[0].largest, found[0].mean) == (0.5, 0.25)
    assert np.isnan(found[1].largest)


def test_a_subject_that_fails_or_hangs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of(Config().replace({"task.name": "sum"}), fake_model(tmp_path))
    monkeypatch.setattr(sampled_parity, "_START", "import sys; sys.exit('no such chip')")
    with pytest.raises(ForgeError, match="The policy gave no log-probabilities: no such chip"):
        compare(plan)

    def hangs(*_, **options):
        raise subprocess.TimeoutExpired("policy", options["timeout"])

    monkeypatch.setattr(sampled_parity.subprocess, "run", hangs)
    with pytest.raises(ForgeError, match="The policy gave no log-probabilities within 600 s"):
        compare(plan)


@pytest.mark.parametrize(
    "words", [[], ["nonsense"], ["parity", "--fast"], ["parity", "stepz=1"], ["parity", "--tolerance", "0"],
              ["parity", "model.path=/nowhere"], ["parity", "task.held_out_fraction=0"]]
)  # fmt: skip
def test_bad_usage_is_one_sentence_and_exit_2(words: list[str], capsys) -> None:
    assert doctor.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
