"""Impossible combinations, one by one; each test gives the smallest change of the default that is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forge_async.config import Config, check, problems
from forge_async.config import checks as c
from forge_async.config import checks_disk as d
from forge_async.config import checks_job as j
from forge_async.config import checks_policy as p
from forge_async.core.errors import ConfigError
from forge_async.replay.settings import SWAP_MODES

SERVICE = {"reference.placement": "service", "objective.kl_weight": 0.1}


@pytest.fixture(autouse=True)
def no_rdma_hardware(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where this machine would list it."""
    monkeypatch.setattr(j, "RDMA_DEVICES", tmp_path / "infiniband")
    return tmp_path / "infiniband"


REFUSED: list[tuple[Any, dict[str, Any], list[str]]] = [
    (c.preset_is_kept, {"async.buffer": "none"}, ["async.max_staleness=2 contradicts async.buffer=none", "to 0"]),
    (
        c.preset_is_kept,
        {"async.buffer": "double", "async.max_staleness": 1, "async.window": 4},
        ["async.window=4 contradicts async.buffer=double"],
    ),
    (
        c.age_is_corrected,
        {"async.correction": "none"},
        ["async.correction=none", "async.max_staleness=2", "async.force_uncorrected=true"],
    ),
    (c.objective_is_known, {"objective.name": "drgrpo"}, ["objective.name=drgrpo", "did you mean", "dr_grpo"]),
    (c.objective_is_known, {"objective.name": "best"}, ["objective.name=best is no objective", "grpo, dr_grpo"]),
    (c.loss_has_a_term, {"objective.weight": 0.0}, ["objective.weight=0", "objective.teacher"]),
    (
        c.updates_go_round,
        {"learner.mini_batches": 3, "learner.updates_per_batch": 4},
        ["learner.updates_per_batch=4", "learner.mini_batches=3", "learner.updates_per_batch=6"],
    ),
    (
        c.updates_go_round,
        {"learner.mini_batches": 4, "learner.updates_per_batch": 4, "groups_per_step": 2},
        ["learner.mini_batches=4", "groups_per_step=2"],
    ),
    (c.divergence_teaches, {"objective.kl_weight": 0.1, "objective.kl_kind": "k1"}, ["kl_kind=k1", "k3_is"]),
    (
        c.divergence_teaches,
        {"objective.kl_weight": 0.1, "objective.kl_kind": "k3_is", "objective.kl_place": "reward"},
        ["kl_kind=k3_is", "k1 or k3"],
    ),
    (
        c.service_has_models,
        {"reference.placement": "service"},
        ["reference.placement=service has no model", "objective.kl_weight=0", "reference.placement=learner"],
    ),
    (
        c.service_hang_is_named,
        {"reference.placement": "service", "objective.kl_weight": 0.1, "rollout.group_timeout_s": 60.0},
        ["reference.timeout_s=120", "rollout.group_timeout_s=60", "reference.timeout_s=30"],
    ),
    (c.values_get_rewards, {"objective.name": "ppo"}, ["objective.name=ppo", "advantage.baseline=none"]),
    (
        c.values_get_rewards,
        {"objective.name": "ppo", "advantage.baseline": "none"},
        ["advantage.scale=group_std must be advantage.scale=none"],
    ),
    (
        c.values_get_rewards,
        {
            "objective.name": "ppo",
            "advantage.baseline": "none",
            "advantage.scale": "none",
            "objective.kl_weight": 0.1,
            "objective.kl_place": "reward",
        },
        ["objective.kl_place=loss"],
    ),
    (
        c.adapters_have_places,
        {"learner.lora.targets": ["q_proj", "v_prj"]},
        ["learner.lora.targets=", "v_prj", "did you mean v_proj?"],
    ),
    (c.adapters_have_places, {"learner.lora.targets": ["lm_head"]}, ["lm_head", "use some of q_proj"]),
    (c.adapters_have_places, {"learner.lora.rank": 8, "learner.lora.targets": []}, ["at least one layer"]),
    (
        c.adapters_have_places,
        {"learner.lora.rank": 8, "learner.lora.targets": ["q_proj", "q_proj"]},
        ["['q_proj', 'q_proj']", "each once"],
    ),
    (p.adapters_can_travel, {"weights.merge_adapters": True}, ["no adapters to merge", "learner.lora.rank=8"]),
    (
        p.adapters_can_travel,
        {"learner.lora.rank": 8, "policy.tensor_parallel": 2},
        ["learner.lora.rank=8 with policy.tensor_parallel=2", "weights.merge_adapters=true"],
    ),
    (c.overlong_fits, {"advantage.overlong_tokens": 4096}, ["advantage.overlong_tokens=4096", "max_new_tokens"]),
    (
        c.age_is_corrected,
        {"async.correction": "none", "async.max_staleness": "auto"},
        ["async.correction=none", "async.max_staleness=auto"],
    ),
    (c.preset_is_kept, {"async.buffer": "double", "async.max_staleness": "auto"}, ["async.max_staleness=auto", "to 1"]),
    (c.dials_agree, {"async.fresh_fraction": 0.5, "async.publish_every": 2}, ["async.publish_every=1"]),
    (c.dials_agree, {"async.max_staleness": "auto", "async.publish_every": 10}, ["max_staleness_cap=8 is below 9"]),
    (c.dials_agree, {"async.publish_every": 4}, ["async.publish_every=4", "async.max_staleness=2"]),
    (c.dials_agree, {"async.window": 130}, ["async.window=130", "129"]),
    (c.dials_agree, {"async.max_staleness": 0, "async.window": 2}, ["async.window=2"]),
    (c.dials_agree, {"async.window": 0}, ["window=0"]),
    (c.dials_agree, {"async.order": "fifo", "async.window": 2}, ["async.order=fifo"]),
    (
        c.dials_agree,
        {"async.buffer": "stream", "async.correction": "none", "async.force_uncorrected": True},
        ["async.buffer=stream", "async.correction=token_is"],
    ),
    (c.parallel_divides, {"learner.ranks": 3, "learner.tensor_parallel": 2}, ["learner.tensor_parallel=2"]),
    (c.parallel_divides, {"learner.ranks": 3, "learner.expert_parallel": 2}, ["learner.expert_parallel=2"]),
    (c.tiny_model_is_made, {"model.tiny": "moe", "model.path": "x"}, ["model.tiny=moe", "model.path=x", "leave one"]),
    (p.quantized_engine_can_be, {"policy.quantize": "fp8"}, ["policy.quantize=fp8 needs a GPU", "quantize=int8"]),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "fp8", "job.gpus_per_host": 2},
        ["policy.quantize=fp8", "policy.dtype=float32", "policy.dtype=bfloat16"],
    ),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "int8", "job.gpus_per_host": 2},
        ["policy.quantize=int8", "policy.dtype=float32", "on a GPU", "policy.dtype=bfloat16"],
    ),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "int8", "policy.tensor_parallel": 2},
        ["policy.quantize=int8", "policy.tensor_parallel=2"],
    ),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "int8", "learner.lora.rank": 8},
        ["policy.quantize=int8", "learner.lora.rank=8", "weights.merge_adapters=true"],
    ),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "int8", "policy.compile": True},
        ["policy.quantize=int8", "policy.compile=true"],
    ),
    (
        p.quantized_engine_can_be,
        {"policy.quantize": "int8", "async.max_staleness": 0, "async.correction": "none"},
        ["policy.quantize=int8 with async.correction=none", "async.correction=token_is"],
    ),
    (p.routing_is_seen, {"policy.keep_routing": True, "policy.compile": True}, ["policy.compile=true", "leave one"]),
    (
        p.routing_is_seen,
        {"policy.keep_routing": True, "policy.tensor_parallel": 2},
        ["policy.keep_routing=true", "policy.tensor_parallel=2", "leave one"],
    ),
    (c.batch_divides, {"learner.ranks": 3}, ["groups_per_step=64", "learner.ranks=3", "groups_per_step=66"]),
    (c.group_has_baseline, {"group_size": 1}, ["group_size=1", "advantage.scale=group_std", "group_size=2"]),
    (
        p.completion_fits,
        {"sampling.max_new_tokens": 64},
        ["sampling.max_new_tokens=64", "policy.max_model_tokens=64", "policy.max_model_tokens=128"],
    ),
    (p.stop_strings_have_text, {"sampling.stop": ["\n", ""]}, ["sampling.stop", "empty"]),
    (p.kept_set_fits, {"sampling.top_k": 100}, ["sampling.top_k=100", "sampling.max_kept_tokens=100", "400 bytes"]),
    (p.block_fits, {"policy.block_tokens": 48}, ["policy.block_tokens=48", "32", "policy.block_tokens=64"]),
    (p.block_fits, {"policy.block_tokens": 20, "job.gpus_per_host": 2}, ["policy.block_tokens=32"]),
    (p.engine_step_fits, {"policy.max_batch_tokens": 256}, ["policy.max_batch_tokens=256", "policy.max_sequences=512"]),
    (p.concurrency_reads, {"policy.concurrency": "few"}, ["policy.concurrency=few", "all, auto"]),
    (p.concurrency_reads, {"policy.concurrency": "0"}, ["policy.concurrency=0"]),
    (c.row_fits, {"learner.row_tokens": 9000}, ["learner.row_tokens=9000", "learner.micro_batch_tokens=2048"]),
    (
        c.compiled_rows_fit,
        {"learner.compile": True, "policy.max_model_tokens": 4096},
        ["4096 tokens of a row", "learner.micro_batch_tokens=2048", "use learner.compile=false"],
    ),
    (c.passes_are_drawn, {"eval.samples": 4, "eval.k": [1, 8]}, ["eval.k=[1, 8]", "use eval.samples=8"]),
    (c.held_out_exists, {"task.held_out_fraction": 0.0}, ["eval.num_prompts=200", "task.held_out_fraction=0"]),
    (j.hosts_exist, {"job.learner_hosts": 2}, ["job.learner_hosts=2", "job.kind=local"]),
    (j.hosts_exist, {"job.policy_hosts": 2, "job.kind": "process"}, ["job.policy_hosts=2"]),
    (j.hosts_share_equally, {"job.kind": "slurm", "job.learner_hosts": 2}, ["learner.ranks=1", "learner.ranks=2"]),
    (j.hosts_share_equally, {"job.kind": "slurm", "job.policy_hosts": 2}, ["policy.replicas=1"]),
    (j.hosts_exist, {**SERVICE, "job.reference_hosts": 1}, ["job.reference_hosts=1", "use job.reference_hosts=0"]),
    (
        j.hosts_exist,
        {**SERVICE, "job.reference_hosts": 2, "job.kind": "process"},
        ["job.kind=process", "use job.reference_hosts=1"],
    ),
    (
        j.reference_hosts_are_used,
        {"job.kind": "slurm", "job.reference_hosts": 2},
        ["job.reference_hosts=2", "reference.placement=learner", "use reference.placement=service"],
    ),
    (
        j.hosts_share_equally,
        {**SERVICE, "job.kind": "slurm", "job.reference_hosts": 2},
        ["reference.ranks=1", "job.reference_hosts=2"],
    ),
    (
        j.nccl_has_gpus,
        {"weights.transport": "broadcast", "weights.broadcast_backend": "nccl"},
        ["weights.broadcast_backend=nccl", "job.gpus_per_host=0", "weights.broadcast_backend=gloo"],
    ),
    (
        j.ipc_has_one_host,
        {"weights.transport": "ipc"},
        ["weights.transport=ipc", "job.gpus_per_host=0", "weights.transport=shm"],
    ),
    (
        j.ipc_has_one_host,
        {"weights.transport": "ipc", "job.gpus_per_host": 8, "job.kind": "slurm"},
        ["weights.transport=ipc", "job.kind=slurm", "weights.transport=auto"],
    ),
    (
        j.ipc_has_one_host,
        {"weights.transport": "ipc", "job.gpus_per_host": 2, "weights.ipc_device": 2},
        ["weights.ipc_device=2", "job.gpus_per_host=2"],
    ),
    (
        j.rdma_has_hardware,
        {"weights.transport": "rdma"},
        ["weights.rdma_backend=ibverbs", "weights.transport=shm", "weights.rdma_backend=tcp"],
    ),
    (j.gpus_suffice, {"job.gpus_per_host": 1}, ["learner.ranks=1", "2 GPUs", "job.gpus_per_host=1"]),
    (
        j.gpus_suffice,
        {**SERVICE, "job.gpus_per_host": 2},
        ["learner.ranks=1, reference.ranks=1 and 1 engine ranks need 3 GPUs"],
    ),
    (
        j.gpus_suffice,
        {**SERVICE, "job.gpus_per_host": 8, "job.kind": "slurm", "learner.ranks": 8},
        ["reference.ranks=1", "job.learner_hosts=1", "job.reference_hosts=1 or more", "reference.placement=learner"],
    ),
    (
        j.gpus_suffice,
        {**SERVICE, "job.gpus_per_host": 8, "job.kind": "slurm", "job.reference_hosts": 1, "reference.ranks": 16},
        ["reference.ranks=16", "job.reference_hosts=2 or more"],
    ),
    (
        j.gpus_suffice,
        {"job.gpus_per_host": 8, "job.kind": "slurm", "learner.ranks": 16},
        ["learner.ranks=16", "job.learner_hosts=1", "job.learner_hosts=2 or more"],
    ),
    (
        j.gpus_suffice,
        {"job.gpus_per_host": 8, "job.kind": "slurm", "policy.replicas": 8, "policy.tensor_parallel": 2},
        ["policy.replicas * policy.tensor_parallel=16"],
    ),
    (j.image_is_given, {"job.kind": "kubernetes"}, ["job.kind=kubernetes", "job.image="]),
    (j.time_limit_reads, {"job.time_limit": "4h"}, ["job.time_limit=4h", "04:00:00"]),
    (c.end_is_chosen, {"run.resume": True, "run.overwrite": True}, ["run.resume=true and run.overwrite=true"]),
]


def refused(test: Any, changes: dict[str, Any]) -> str:
    config = Config().replace(changes)
    text = test(config)
    assert text, "accepted"
    assert "\n" not in text and text.endswith((".", "?"))
    with pytest.raises(ConfigError):
        check(config)
    assert text in list(problems(config))
    return text


@pytest.mark.parametrize(("test", "changes", "parts"), REFUSED, ids=lambda item: getattr(item, "__name__", ""))
def test_impossible_combinations_are_refused(test: Any, changes: dict[str, Any], parts: list[str]) -> None:
    text = refused(test, changes)
    for part in parts:
        assert part in text, text


def test_each_check_has_a_test() -> None:
    assert {test for test, _, _ in REFUSED} == set(c.CHECKS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"async.window": 129},
        {"async.publish_every": 3},
        {"async.max_staleness": 0, "async.correction": "none"},
        {"async.correction": "none", "async.force_uncorrected": True},
        {"learner.ranks": 2},
        {"policy.block_tokens": 16, "job.gpus_per_host": 2},
        {"task.held_out_fraction": 0.0, "eval.num_prompts": 0},
        {"job.kind": "slurm", "job.learner_hosts": 2, "learner.ranks": 4, "job.time_limit": "2-04:00:00"},
        {**SERVICE, "job.kind": "process", "job.reference_hosts": 1},
        {
            **SERVICE,
            "job.kind": "slurm",
            "job.gpus_per_host": 8,
            "learner.ranks": 8,
            "job.reference_hosts": 2,
            "reference.ranks": 16,
        },
        {"job.kind": "kubernetes", "job.image": "x:1"},
        {"async.on_stale": "drop"},
        *({"async.swap": mode} for mode in SWAP_MODES),
        {"policy.concurrency": "auto"},
        {"policy.concurrency": "16"},
        {"async.on_stale": "reweight"},
        {"group_size": 1, "advantage.baseline": "none"},
        {"objective.name": "gspo", "async.correction": "icepop"},
        {"objective.kl_weight": 0.1, "objective.kl_kind": "k1", "objective.kl_place": "reward"},
        {"objective.entropy_weight": 0.1, "objective.weight": 0.0},
        {"async.fresh_fraction": 0.5},
        {"async.max_staleness": "auto", "async.publish_every": 9},
        {"weights.transport": "rpc"},
        {"sampling.top_k": 64},
        {"sampling.top_p": 0.9, "sampling.temperature": 0.7, "sampling.top_k": 20},
    ],
)
def test_what_only_just_fits_is_accepted(changes: dict[str, Any]) -> None:
    check(Config().replace(changes))


def test_check_tells_the_first_problem_and_problems_tells_all() -> None:
    config = Config().replace({"weights.transport": "ipc", "group_size": 1, "learner.ranks": 3})
    told = list(problems(config))
    assert len(told) == 3
    with pytest.raises(ConfigError, match=re.escape(told[0])):
        check(config)


def test_rdma_is_accepted_where_the_machine_lists_hardware_where_it_is_not_known_and_without(
    no_rdma_hardware: Path,
) -> None:
    rdma = {"weights.transport": "rdma"}
    no_rdma_hardware.mkdir()
    assert "weights.rdma_backend=tcp" in refused(j.rdma_has_hardware, rdma)
    check(Config().replace(rdma | {"weights.rdma_backend": "tcp"}))
    assert j.rdma_has_hardware(Config().replace(rdma | {"job.kind": "slurm"})) is None
    (no_rdma_hardware / "mlx5_0").mkdir()
    check(Config().replace(rdma))


# What lies on disk.


def test_prompts_must_be_a_jsonl_file(tmp_path: Path) -> None:
    good = tmp_path / "data.jsonl"
    assert "prompts=gsm8k is not a .jsonl file" in refused(d.prompts_are_there, {"prompts": "gsm8k"})
    assert "does not exist" in refused(d.prompts_are_there, {"prompts": str(good)})
    good.write_text("{}\n")
    check(Config().replace({"prompts": str(good)}))


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        ("{dir}/my.py", "names no function"),
        ("{dir}/my.py:", "names no function"),
        ("{dir}/my.py:a b", "names no function"),
        ("{dir}/none.py:score", "does not exist"),
        ("{dir}/my.py:scor", "did you mean {dir}/my.py:score?"),
        ("{dir}/my.py:other_thing", "define other_thing(...)"),
        ("{dir}/broken.py:score", "broken.py, line 1, is not Python"),
        ("nopackage.module:score", "no package nopackage"),
        (".module:score", "no package"),
    ],
)
def test_rewards_that_cannot_be_found_are_refused(reward: str, part: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("import os\n\ndef score(x):\n    return 0.0\n")
    (tmp_path / "broken.py").write_text("def score(:\n")
    text = refused(d.reward_is_there, {"reward": reward.format(dir=tmp_path)})
    assert part.format(dir=tmp_path) in text, text


@pytest.mark.parametrize("name", ["score", "later", "imported", "conditional"])
def test_rewards_that_may_be_there_are_accepted_without_running_them(name: str, tmp_path: Path) -> None:
    code = "from os import path as imported\nasync def score(x): ...\nlater = score\n"
    code += "if True:\n    conditional = score\n" if name == "conditional" else "\n"
    (tmp_path / "my.py").write_text(code + "raise_if_run: int = undefined\n")
    check(Config().replace({"reward": f"{tmp_path / 'my.py'}:{name}"}))
    check(Config().replace({"reward": "json.decoder:loads"}))


def test_a_model_that_looks_local_must_be_there(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for path in (str(folder), "./absent", "a/b/c"):
        assert f"model.path={path} does not exist" in refused(d.model_is_there, {"model.path": path})
    folder.mkdir()
    assert "no config.json" in refused(d.model_is_there, {"model.path": str(folder)})
    (folder / "config.json").write_text("{}")
    check(Config().replace({"model.path": str(folder)}))
    assert "is a file" in refused(d.model_is_there, {"model.path": str(folder / "config.json")})


@pytest.mark.parametrize("name", ["smollm2", "Qwen/Qwen3-0.6B", "gpt2"])
def test_names_of_the_hub_are_left_to_the_loader(name: str) -> None:
    check(Config().replace({"model.path": name}))


def test_only_a_run_can_go_on(tmp_path: Path) -> None:
    assert "needs run.dir" in refused(d.run_dir_is_free, {"run.resume": True})
    assert "nothing can go on" in refused(d.run_dir_is_free, {"run.resume": True, "run.dir": str(tmp_path / "no")})
    assert "holds no run" in refused(d.run_dir_is_free, {"run.resume": True, "run.dir": str(tmp_path)})


def test_a_run_directory_that_exists_is_refused(tmp_path: Path) -> None:
    text = refused(d.run_dir_is_free, {"run.dir": str(tmp_path)})
    assert f"run.dir={tmp_path} exists" in text and "run.overwrite=true" in text and "run.resume=true" in text
    file = tmp_path / "file"
    file.write_text("")
    assert "is a file" in refused(d.run_dir_is_free, {"run.dir": str(file)})
    assert "cannot be made" in refused(d.run_dir_is_free, {"run.dir": str(file / "below")})
    check(Config().replace({"run.dir": str(tmp_path / "a" / "b")}))


def test_overwriting_deletes_runs_only(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    changes = {"run.dir": str(run), "run.overwrite": True}
    check(Config().replace(changes))
    (run / "thesis.tex").write_text("")
    assert "holds no run" in refused(d.run_dir_is_free, changes)
    (run / "config.yaml").write_text("")
    for name in ("journal", "checkpoints", "logs"):
        (run / name).mkdir()
    check(Config().replace(changes))
    monkeypatch.chdir(run / "logs")
    assert "the folder you are in" in refused(d.run_dir_is_free, changes)


def test_a_place_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(d.os, "access", lambda path, mode: False)
    assert "may not be written to" in refused(d.run_dir_is_free, {"run.dir": str(tmp_path / "x")})
