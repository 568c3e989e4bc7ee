"""Cheap checks of a model against the configuration, before any process starts: each failure is one sentence.

What is refused here would otherwise show minutes later, in some process, as an error of a library: vLLM fails on an
unsuited head_dim at its first step only, and waits for ever for KV blocks that its cache does not have.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.core.packages import require, require_compiler
from forge_async.runtime.model_shape import ModelShape, read_shape

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM 0.32's attention on CPU is compiled for."""
FEATURES = {
    "monarch": "A run's processes",
    "torch": "The learner",
    "torchtitan": "The learner",
    "vllm": "The policy engine",
    "torchstore": "The weight store",
    "xxhash": "The weight store",
    "transformers": "The tokenizer",
    "safetensors": "Reading a model",
}
"""Packages that every run needs, and what for."""
MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
"""Where the system has named shared memory; containers give it 64 MiB unless told otherwise. No weights lie there."""
SEMAPHORE_BYTES = 64 << 10
"""Of it, for the semaphores of a run's processes, which take a page each and give up their names at once."""
QUEUE_BYTES = 25 * MIB
"""Of it, for vLLM's message queue between the ranks of one engine: six chunks of 4 MiB, and their counters."""


def check_before_start(config: Config, folder: Path) -> None:
    """What a run checks before it starts processes: packages, this machine, sizes, the tokenizer; milliseconds.

    Whether the prompts fit is seen by the rollout workers, which open the task anyway, before anything trains.
    """
    from forge_async.backends.tasks import check_tokenizer_files

    check_machine(config)
    check_shape(config, read_shape(folder, config.model.path))
    check_tokenizer_files(folder)


def check_model(config: Config, folder: Path) -> None:
    """Everything below, in order: packages, sizes, tokenizer and prompts. torch is not imported.

    The last part imports transformers' tokenizers and the task's library: 3.5 s of CPU; the others take milliseconds.

    Args:
        config: checked configuration.
        folder: what `resolve_model` returned for it.

    Raises ConfigError, of one sentence, for the first thing that would keep the run from working.
    """
    check_machine(config)
    check_shape(config, read_shape(folder, config.model.path))
    check_prompts(config, folder)


def check_machine(config: Config) -> None:
    """What needs no model, and so comes before one is fetched or made: the packages and the shared memory."""
    check_packages(config)
    check_shared_memory(config)


def check_packages(config: Config) -> None:
    """Raise MissingPackageError for a package that is missing or of another version; by metadata, without imports."""
    for module, feature in FEATURES.items():
        require(module, feature=feature)
    if not config.root.prompts:
        require("reasoning_gym", feature=f"task.name={config.task.name}")
    for key in ("learner.compile", "policy.compile"):
        if config.value(key) and config.job.gpus_per_host == 0:
            require_compiler(feature=f"{key}=true")
    if config.observe.tensorboard:
        require("tensorboard", feature="observe.tensorboard=true")


def check_shared_memory(config: Config, folder: Path = SHARED_MEMORY) -> None:
    """Raise ConfigError when `folder`, named shared memory, cannot hold what the processes on this machine put there.

    The ranks of an engine would wait minutes for the one whose queue found no room. A queue is counted whole, though
    little of it is ever touched: memory that is promised and not there ends a process by SIGBUS.
    """
    if config.job.kind not in ("local", "process"):
        return
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{folder} is missing or cannot be written, and the policy engine keeps its semaphores there; "
            "mount a tmpfs there that every user may write to."
        )
    ranks, engines = config.policy.tensor_parallel, config.policy.replicas
    need = SEMAPHORE_BYTES + (engines * QUEUE_BYTES if ranks > 1 else 0)
    free = shutil.disk_usage(folder).free
    if free < need:
        what = f"policy.tensor_parallel={ranks} with policy.replicas={engines}" if ranks > 1 else "a run"
        other = ", or use policy.tensor_parallel=1" if ranks > 1 else ""
        raise ConfigError(
            f"{folder} has {free / MIB:.2f} MiB free, and {what} needs {need / MIB:.2f} MiB; "
            f"make it larger (a container: --shm-size={-(-need // MIB)}m){other}."
        )


def check_shape(config: Config, shape: ModelShape) -> None:
    """Raise ConfigError when engine or learner cannot have a model of these sizes as the configuration asks for it."""
    on_gpu = config.job.gpus_per_host > 0
    if not on_gpu and shape.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"The model's head_dim={shape.head_dim} cannot be served on CPU, where the engine knows "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}; give another model.path."
        )
    longest = config.policy.max_model_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"policy.max_model_tokens={longest} is above the model's max_position_embeddings={shape.max_positions}; "
            f"use policy.max_model_tokens={shape.max_positions} or less."
        )
    heads, width = f"{shape.num_heads} attention heads", f"intermediate_size={shape.intermediate_size}"
    for key, what, size in (
        ("policy.tensor_parallel", heads, shape.num_heads),
        ("policy.tensor_parallel", width, shape.intermediate_size),
        ("learner.tensor_parallel", heads, shape.num_heads),
    ):
        if size % (ranks := config.value(key)):
            raise ConfigError(f"{key}={ranks} does not divide the model's {what}; use a divisor, such as {key}=1.")
    check_mixture(config, shape)
    _check_kv_heads(config, shape)
    _check_kv_cache(config, shape)


def _check_kv_heads(config: Config, shape: ModelShape) -> None:
    ranks, heads = config.policy.tensor_parallel, shape.num_kv_heads
    if max(ranks, heads) % min(ranks, heads):
        raise ConfigError(
            f"policy.tensor_parallel={ranks} neither divides the model's {heads} key-value heads nor is a multiple of "
            "them; use a divisor, such as policy.tensor_parallel=1."
        )
    if heads % config.learner.tensor_parallel:
        raise ConfigError(
            f"learner.tensor_parallel={config.learner.tensor_parallel} does not divide the model's {heads} key-value "
            "heads, and torchtitan copies none; use a divisor, such as learner.tensor_parallel=1."
        )


def check_mixture(config: Config, shape: ModelShape) -> None:
    """Raise ConfigError where a mixture of experts is asked for what it, or a dense model, does not have."""
    spread, on_gpu = config.learner.expert_parallel, config.job.gpus_per_host > 0
    if not shape.num_experts:
        asked = {
            "policy.keep_routing=true": config.policy.keep_routing,
            f"learner.expert_parallel={spread}": spread > 1,
        }
        for word in (word for word, is_asked in asked.items() if is_asked):
            raise ConfigError(
                f"{word} is for mixtures of experts, and the model is a dense {shape.kind}; leave it out."
            )
        return
    if shape.num_experts % spread:
        raise ConfigError(
            f"learner.expert_parallel={spread} does not divide the model's {shape.num_experts} experts; "
            "use a divisor, such as learner.expert_parallel=1."
        )
    not_built = (
        ("policy.quantize", "none"),
        ("learner.tensor_parallel", 1),
        ("learner.compile", False),
    )
    for key, built in not_built:
        if (value := config.value(key)) != built:
            asked, remedy = (f"{key}={str(each).lower()}" for each in (value, built))
            raise ConfigError(f"{asked} is not built for mixtures of experts; use {remedy}.")
    ranks = config.policy.tensor_parallel
    if shape.expert_size % ranks:
        raise ConfigError(
            f"policy.tensor_parallel={ranks} does not divide the model's moe_intermediate_size={shape.expert_size}; "
            "use a divisor, such as policy.tensor_parallel=1."
        )
    if ranks > shape.num_experts:
        raise ConfigError(
            f"policy.tensor_parallel={ranks} is above the model's num_experts={shape.num_experts}, which vLLM does not "
            "serve; use fewer, such as policy.tensor_parallel=1."
        )
    if not on_gpu and shape.hidden_size % 32:
        raise ConfigError(
            f"The model's hidden_size={shape.hidden_size} is no multiple of 32, as experts need it on CPU; "
            "give another model.path."
        )


def _check_kv_cache(config: Config, shape: ModelShape) -> None:
    """One sequence of full length must fit, in whole blocks, beside the one block that vLLM keeps for itself."""
    need = least_kv_cache_bytes(config, shape)
    if config.policy.kv_cache_bytes < need:
        raise ConfigError(
            f"policy.kv_cache_bytes={config.policy.kv_cache_bytes} cannot hold one sequence of "
            f"policy.max_model_tokens={config.policy.max_model_tokens} tokens of this model; "
            f"use policy.kv_cache_bytes={need} or more (a sequence that runs beside it needs as much again)."
        )


def kv_block_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of one KV block on one rank of an engine."""
    ranks = min(config.policy.tensor_parallel, shape.num_kv_heads)
    return config.policy.block_tokens * shape.kv_bytes_per_token(config.policy.dtype) // ranks


def least_kv_cache_bytes(config: Config, shape: ModelShape) -> int:
    """The smallest `policy.kv_cache_bytes` with which the longest sequence can be generated."""
    return (-(-config.policy.max_model_tokens // config.policy.block_tokens) + 1) * kv_block_bytes(config, shape)


def full_length_sequences(config: Config, shape: ModelShape) -> int:
    """Sequences of full length that the KV cache of one engine holds at a time."""
    blocks = config.policy.kv_cache_bytes // kv_block_bytes(config, shape) - 1
    return blocks // -(-config.policy.max_model_tokens // config.policy.block_tokens)


def check_prompts(config: Config, folder: Path) -> int:
    """Check the tokenizer, the prompts and the chat template together; returns the longest of the probed prompts.

    Raises ConfigError when there is no usable tokenizer, it does not belong to the model, the task cannot be opened or
    rendered, or a prompt and its completion are longer than the engine takes.
    """
    from forge_async.backends.tasks import check_prompts_fit, check_tokenizer_files, open_task

    check_tokenizer_files(folder)
    root = config.root
    task = open_task(str(folder), config.task, prompts=root.prompts, reward=root.reward, seed=root.seed)
    return check_prompts_fit(task, config.sampling.max_new_tokens, config.policy.max_model_tokens)


def check_task(config: Config) -> None:
    """Raise ConfigError when the task or the file of prompts cannot be opened; for when there is no tokenizer yet."""
    if config.root.prompts:
        from forge_async.prompt.jsonl import read_jsonl

        read_jsonl(config.root.prompts)
        return
    from forge_async.backends.reasoning_gym_task import BUILT_INS, create_data_set

    built_in = BUILT_INS.get(config.task.name)
    data_set, options = (built_in.data_set, built_in.options) if built_in else (config.task.name, {})
    create_data_set(data_set, {**options, **config.task.options})
