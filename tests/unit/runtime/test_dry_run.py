"""What --dry-run tells, and that it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_folders import SMOLLM2, fake_model

from forge_async.config import Config, load
from forge_async.config.sources import shipped_names
from forge_async.core.errors import ConfigError
from forge_async.replay.bound import effective
from forge_async.runtime import jobs
from forge_async.runtime.dry_run import describe


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("FORGE_ASYNC_CACHE", str(cache))
    yield
    assert list(work.iterdir()) == [] and not cache.exists()


def tiny(tmp_path: Path, **values) -> Config:
    return Config.of({"model.path": str(fake_model(tmp_path / "model")), "task.name": "sum", **values})


def line(text: str, word: str) -> str:
    return next(row for row in text.splitlines() if row.split()[:1] == [word])


def test_placement_names_every_process_with_its_number(tmp_path: Path) -> None:
    text = describe(tiny(tmp_path, **{"learner.ranks": 2, "policy.replicas": 3, "rollout.workers": 2}))
    assert line(text, "learner").split()[:3] == ["learner", "2", "here"] and "FSDP2 over 2 ranks" in text
    assert line(text, "policy").split()[1] == "3" and line(text, "rollout").split()[1] == "2"
    assert all(line(text, kind) for kind in ("controller", "store", "replay"))


def test_a_quantised_engine_is_told(tmp_path: Path) -> None:
    assert "vLLM, float32, linear layers in int8 " in line(
        describe(tiny(tmp_path, **{"policy.quantize": "int8"})), "policy"
    )


def test_a_reference_service_is_placed_by_itself(tmp_path: Path) -> None:
    text = describe(tiny(tmp_path, **{"objective.kl_weight": 0.1, "reference.placement": "service"}))
    assert line(text, "reference").split()[:3] == ["reference", "1", "here"] and "reference, read only" in text
    assert "read only" not in describe(tiny(tmp_path, **{"objective.kl_weight": 0.1}))


def test_a_reference_service_of_a_cluster_is_on_hosts_of_its_own_or_on_the_first_of_the_learners(
    tmp_path: Path,
) -> None:
    values = {"objective.kl_weight": 0.1, "reference.placement": "service", "job.kind": "slurm"}
    one = describe(tiny(tmp_path / "a", **values))
    assert "1 slurm host (learner)" in line(one, "reference") and "where: the first of the learner's hosts" in one
    many = describe(tiny(tmp_path / "b", **values, **{"job.learner_hosts": 2, "learner.ranks": 2}))
    assert "the first of 2 slurm hosts (learner)" in line(many, "reference")
    own = describe(tiny(tmp_path / "c", **values, **{"job.reference_hosts": 2, "reference.ranks": 4}))
    assert "2 slurm hosts (reference)" in line(own, "reference")
    assert "  reference:\n    hosts: 2\n    processes_per_host: 2\n" in own


def test_sizes_come_from_the_models_folder(tmp_path: Path) -> None:
    text = describe(tiny(tmp_path))
    assert "105,024 parameters" in text and "prompts of up to 5 tokens" in text
    assert "2047 sequences of full length (64 tokens)" in text and "512 bytes a token" in text
    assert text.endswith("Everything that can be checked without starting is in order.")


def test_the_effective_bound_is_told(tmp_path: Path) -> None:
    config = tiny(tmp_path, **{"async.max_staleness": 2, "async.window": 5})
    text = describe(config)
    assert "at most 2 steps old" in text and "window of 5 groups" in text
    assert f"up to {effective(config.asynchrony, config.root.groups_per_step).depth} groups" in text
    assert "synchronous: 64 groups" in describe(tiny(tmp_path, **{"async.max_staleness": 0}))


def test_a_preset_without_a_bound_says_so(tmp_path: Path) -> None:
    config, _ = load(["async.buffer=stream", f"model.path={fake_model(tmp_path / 'model')}", "task.name=sum"])
    assert "no bound on age" in describe(config)


def test_two_hosts_of_this_machine_are_named(tmp_path: Path) -> None:
    assert "a Monarch host of its own here (learner)" in describe(tiny(tmp_path, **{"job.kind": "process"}))


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_configuration_is_described(name: str) -> None:
    config, _ = load(["--config", name])
    text = describe(config)
    assert "the model is not at hand" in text and "memory" not in text
    if config.job.kind in ("slurm", "kubernetes"):
        assert jobs.describe(config.job) in text


def test_a_cluster_places_by_hosts_and_prints_the_specification(tmp_path: Path) -> None:
    values = {"job.kind": "slurm", "job.policy_hosts": 2, "policy.replicas": 4, "job.partition": "gpu"}
    text = describe(tiny(tmp_path, **values))
    assert "2 slurm hosts (policy)" in text and "partition: gpu" in text
    assert jobs.describe(Config.of(values).job, learner_procs=1, policy_procs=4).strip() in text


def test_memory_that_this_machine_lacks_is_pointed_out(tmp_path: Path) -> None:
    assert "THIS MAY NOT FIT" not in describe(tiny(tmp_path))
    assert "THIS MAY NOT FIT" in describe(tiny(tmp_path, **{"policy.kv_cache_bytes": 1 << 50}))


def test_a_real_models_memory_is_estimated_from_its_sizes(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "model", SMOLLM2)
    text = describe(Config.of({"model.path": str(folder), "policy.kv_cache_bytes": 1 << 29}))
    assert "135 million parameters" in text and "2.41 GB" in line(text, "policy")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"policy.max_model_tokens": 512}, "max_position_embeddings=256"),
        ({"policy.max_model_tokens": 8}, "A prompt of 5 tokens"),
        ({"model.path": "./nowhere"}, "does not exist"),
        ({"model.path": "", "task.name": "nonsense"}, "nonsense"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, values: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        describe(tiny(tmp_path).replace(values))
