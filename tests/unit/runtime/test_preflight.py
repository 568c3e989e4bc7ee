"""What is refused before any process starts, each in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_folders import QWEN3, QWEN3_MOE, SMOLLM2, fake_model

from forge_async.apps import grpo
from forge_async.config import Config
from forge_async.core import packages
from forge_async.core.errors import ConfigError, MissingPackageError
from forge_async.runtime import preflight
from forge_async.runtime.dry_run import describe
from forge_async.runtime.model_shape import ARCHITECTURES, read_shape
from forge_async.runtime.preflight import (
    check_before_start,
    check_model,
    check_packages,
    check_prompts,
    check_shape,
    check_shared_memory,
    check_task,
    full_length_sequences,
    least_kv_cache_bytes,
)

EXPERTS = {key: value for key, value in QWEN3_MOE.items() if key not in QWEN3 or value != QWEN3[key]}
TINY = Config.of({"task.name": "sum"})


def refusal(call, *arguments) -> str:
    """The sentence that `call` is refused with."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    text = str(caught.value)
    assert "\n" not in text and text.endswith((".", ")", "]")) and caught.value.exit_code == 2
    return text


def test_the_default_configuration_suits_the_tiny_model(tmp_path: Path) -> None:
    check_model(TINY, fake_model(tmp_path))


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    fake_model(tmp_path)
    code = (
        "import sys; from pathlib import Path; from forge_async.config import Config\n"
        "from forge_async.runtime.preflight import check_model\n"
        f"check_model(Config(), Path({str(tmp_path)!r}))\n"
        "print(*({'torch', 'vllm', 'torchtitan', 'torchstore', 'monarch'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN3, 105_024),
        (SMOLLM2, 134_515_008),
        (QWEN3 | {"tie_word_embeddings": False}, 105_024 + 98 * 64),
        # Each mixture has 8 experts of 3 matrices 32 x 64 and a router in place of 3 matrices 192 x 64.
        (QWEN3_MOE, 105_024 + 2 * (8 * 64 * (3 * 32 + 1) - 3 * 192 * 64)),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, 105_024 + 8 * 64 * (3 * 32 + 1) - 3 * 192 * 64),
    ],
)
def test_parameters_are_counted_as_the_model_has_them(tmp_path: Path, config: dict, parameters: int) -> None:
    assert read_shape(fake_model(tmp_path, config)).num_parameters == parameters


def test_head_dim_and_kv_heads_have_their_usual_defaults(tmp_path: Path) -> None:
    shape = read_shape(fake_model(tmp_path, SMOLLM2, head_dim=None, num_key_value_heads=None))
    assert (shape.head_dim, shape.num_kv_heads) == (64, 9)


def test_supported_architectures_are_those_that_the_learner_builds() -> None:
    source = Path(__file__).parents[3] / "forge_async/backends/titan_models.py"
    line = next(line for line in source.read_text().splitlines() if "builders = {" in line)
    assert all(f'"{kind}":' in line for kind in ARCHITECTURES) and line.count(":") == len(ARCHITECTURES)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["'gpt2'", "qwen3, qwen3_moe, llama"]),
        ({"model_type": None}, ["type ''"]),
        ({"num_hidden_layers": None}, ["gives no 'num_hidden_layers'"]),
        ({"num_hidden_layers": "two"}, ["cannot be understood"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["'yarn'", "default"]),
        ({"attention_bias": True}, ["attention_bias=true"]),
        ({"model_type": "llama", "head_dim": 48}, ["head_dim=48", "hidden_size=64"]),
    ],
)
def test_a_model_that_the_learner_cannot_train_is_refused(tmp_path: Path, changes: dict, words: list[str]) -> None:
    text = refusal(read_shape, fake_model(tmp_path, **changes), "my/model")
    assert all(word in text for word in ["model.path=my/model", *words])


def test_llama_3_scaling_is_known(tmp_path: Path) -> None:
    assert read_shape(fake_model(tmp_path, SMOLLM2, rope_scaling={"rope_type": "llama3"})).kind == "llama"


@pytest.mark.parametrize(("text", "word"), [(None, "no config.json"), ("{", "not JSON"), ("[]", "no object")])
def test_an_unreadable_config_is_refused(tmp_path: Path, text: str | None, word: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert word in refusal(read_shape, tmp_path)


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"head_dim": 16}, {}, ["head_dim=16", "on CPU", "32, 64"]),
        ({}, {"policy.max_model_tokens": 512}, ["policy.max_model_tokens=512", "max_position_embeddings=256"]),
        ({}, {"learner.tensor_parallel": 3}, ["learner.tensor_parallel=3", "2 attention heads"]),
        (
            {"intermediate_size": 193},
            {"policy.tensor_parallel": 2},
            ["policy.tensor_parallel=2 does not divide the model's intermediate_size=193"],
        ),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            {"policy.tensor_parallel": 2},
            ["policy.tensor_parallel=2", "3 key-value heads"],
        ),
        ({"num_key_value_heads": 1}, {"learner.tensor_parallel": 2}, ["tensor_parallel=2", "1 key-value heads"]),
        ({}, {"policy.keep_routing": True}, ["policy.keep_routing=true", "a dense qwen3", "leave it out"]),
        ({}, {"learner.expert_parallel": 2}, ["learner.expert_parallel=2", "a dense qwen3"]),
        (EXPERTS, {"learner.expert_parallel": 3}, ["learner.expert_parallel=3", "8 experts"]),
        (
            EXPERTS | {"moe_intermediate_size": 33},
            {"policy.tensor_parallel": 2},
            ["policy.tensor_parallel=2", "moe_intermediate_size=33", "policy.tensor_parallel=1"],
        ),
        (EXPERTS | {"num_experts": 1}, {"policy.tensor_parallel": 2}, ["policy.tensor_parallel=2", "num_experts=1"]),
        (EXPERTS, {"learner.tensor_parallel": 2}, ["learner.tensor_parallel=2", "mixtures of experts"]),
        (EXPERTS, {"policy.quantize": "int8"}, ["policy.quantize=int8", "use policy.quantize=none"]),
        (EXPERTS, {"learner.compile": True}, ["learner.compile=true", "use learner.compile=false"]),
        (EXPERTS | {"hidden_size": 48}, {}, ["hidden_size=48", "on CPU"]),
        ({"num_hidden_layers": 512}, {"policy.kv_cache_bytes": 1 << 20}, ["policy.kv_cache_bytes=1048576", "or more"]),
    ],
)
def test_sizes_that_cannot_work_are_refused(tmp_path: Path, changes: dict, settings: dict, words: list[str]) -> None:
    shape = read_shape(fake_model(tmp_path, **changes))
    text = refusal(check_shape, Config.of(settings), shape)
    assert all(word in text for word in words)


def test_a_gpu_serves_other_head_dims(tmp_path: Path) -> None:
    check_shape(Config.of({"job.gpus_per_host": 2}), read_shape(fake_model(tmp_path, head_dim=16)))


def test_the_least_kv_cache_holds_one_sequence_beside_the_engines_own_block(tmp_path: Path) -> None:
    shape = read_shape(fake_model(tmp_path, SMOLLM2))
    settings = {"policy.max_model_tokens": 100, "policy.block_tokens": 32, "policy.dtype": "float32"}
    need = least_kv_cache_bytes(Config.of(settings), shape)
    assert need == (4 + 1) * 32 * 2 * 30 * 3 * 64 * 4
    enough = Config.of(settings | {"policy.kv_cache_bytes": need})
    check_shape(enough, shape)
    assert full_length_sequences(enough, shape) == 1
    refusal(check_shape, Config.of(settings | {"policy.kv_cache_bytes": need - 1}), shape)


def test_a_prompt_without_room_for_its_completion_is_refused(tmp_path: Path) -> None:
    config = TINY.replace({"policy.max_model_tokens": 8, "sampling.max_new_tokens": 4})
    text = refusal(check_prompts, config, fake_model(tmp_path))
    assert "A prompt of 5 tokens" in text and "policy.max_model_tokens=32" in text


def test_the_longest_of_the_first_prompts_counts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": "x" * size}) + "\n" for size in (5, 40, 7)))
    values = {"prompts": str(prompts), "reward": "my.py:score", "task.held_out_fraction": 0.0}
    assert check_prompts(TINY.replace(values), fake_model(tmp_path / "model")) == 41  # with the start token


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    assert "do not belong together" in refusal(check_prompts, TINY, fake_model(tmp_path, vocab_size=50))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    for file in fake_model(tmp_path).glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refusal(check_prompts, TINY, tmp_path)


def test_a_chat_needs_a_template(tmp_path: Path) -> None:
    assert "task.chat=on" in refusal(check_prompts, TINY.replace({"task.chat": "on"}), fake_model(tmp_path))


def test_a_prompt_that_the_tokenizer_cannot_express_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "\\u00fc"}\n')
    config = TINY.replace({"prompts": str(tmp_path / "p.jsonl"), "reward": "my.py:score"})
    assert "cannot express" in refusal(check_prompts, config, fake_model(tmp_path / "model"))


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None if name == "vllm" else object())
    with pytest.raises(MissingPackageError, match=r"The policy engine needs vllm.*pip install"):
        check_packages(Config())


@pytest.mark.parametrize("key", ["learner.compile", "policy.compile"])
def test_compiling_on_a_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    compiles = Config().replace({key: True})
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_packages(Config())
    check_packages(compiles.replace({"job.gpus_per_host": 1}))
    with pytest.raises(
        MissingPackageError, match=f"{key}=true needs a C.. compiler, and no-such-compiler is not found"
    ):
        check_packages(compiles)
    monkeypatch.setenv("CXX", sys.executable)
    check_packages(compiles)


def test_a_task_is_looked_at_without_a_tokenizer() -> None:
    check_task(TINY)
    assert "nonsense" in refusal(check_task, TINY.replace({"task.name": "nonsense"}))
    assert "no_option" in refusal(check_task, TINY.replace({"task.options": {"no_option": 1}}))


def free_bytes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let every file system have so much room."""
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=count))


@pytest.mark.parametrize(
    ("free", "values"),
    [
        (64 << 10, {}),
        (64 << 20, {"policy.tensor_parallel": 2, "policy.replicas": 2}),  # what a container has unless told otherwise
        (0, {"job.kind": "slurm", "policy.tensor_parallel": 2}),  # whose engines are on other machines
    ],
)
def test_shared_memory_that_is_large_enough_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, values: dict
) -> None:
    free_bytes(monkeypatch, free)
    check_shared_memory(Config.of(values), tmp_path)


@pytest.mark.parametrize(
    ("free", "values", "words"),
    [
        (48 << 10, {}, ["0.05 MiB free", "a run needs 0.06 MiB", "--shm-size=1m"]),
        (8 << 20, {"policy.tensor_parallel": 2}, ["8.00 MiB free", "--shm-size=26m", "policy.tensor_parallel=1"]),
        (
            64 << 20,
            {"policy.tensor_parallel": 2, "policy.replicas": 3, "job.kind": "process"},
            ["policy.tensor_parallel=2 with policy.replicas=3 needs 75.06 MiB", "--shm-size=76m"],
        ),
    ],
)
def test_shared_memory_that_is_too_small_is_named_with_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, values: dict, words: list[str]
) -> None:
    free_bytes(monkeypatch, free)
    text = refusal(check_shared_memory, Config.of(values), tmp_path)
    assert all(word in text for word in [str(tmp_path), *words]), text


def test_shared_memory_that_is_missing_is_named(tmp_path: Path) -> None:
    assert "is missing or cannot be written" in refusal(check_shared_memory, TINY, tmp_path / "none")


def test_shared_memory_is_looked_at_before_a_model_is_fetched_or_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    free_bytes(monkeypatch, 0)
    monkeypatch.setenv("FORGE_ASYNC_CACHE", str(tmp_path / "cache"))
    assert grpo.main(["task.name=sum", f"run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr()
    assert "0.00 MiB free" in said.err and not said.out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("check", [check_model, check_before_start, lambda config, _: describe(config)])
def test_shared_memory_is_looked_at_before_a_run_and_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check
) -> None:
    model = fake_model(tmp_path)
    free_bytes(monkeypatch, 0)
    assert "0.00 MiB free" in refusal(check, Config.of({"task.name": "sum", "model.path": str(model)}), model)
