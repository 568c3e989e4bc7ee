"""Combinations of the engine's settings that cannot run, each refused in one sentence; see `checks.py`."""

from __future__ import annotations

from collections.abc import Callable

from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.policy.concurrency import concurrency_limit


def adapters_can_travel(config: Config) -> str | None:
    """Adapters are merged only where there are some, and served by themselves only by engines of one rank."""
    if config.weights.merge_adapters and not config.lora.rank:
        return "weights.merge_adapters=true has no adapters to merge; give learner.lora.rank=8 or so, or leave it out."
    if config.travelling_lora() and config.policy.tensor_parallel > 1:
        return (
            f"learner.lora.rank={config.lora.rank} with policy.tensor_parallel={config.policy.tensor_parallel}: "
            "engines of several ranks take no adapters yet; use weights.merge_adapters=true."
        )
    return None


def quantized_engine_can_be(config: Config) -> str | None:
    """Layers are quantised by engines of one rank, from whole weights, for kernels that the machine has."""
    policy, on_gpu = config.policy, config.job.gpus_per_host > 0
    if policy.quantize == "none":
        return None
    given = f"policy.quantize={policy.quantize}"
    if policy.quantize == "fp8" and not on_gpu:
        return f"{given} needs a GPU, and job.gpus_per_host=0; use policy.quantize=int8."
    if on_gpu and policy.dtype == "float32":
        return f"{given} with policy.dtype=float32 has no kernel on a GPU; use policy.dtype=bfloat16."
    if policy.tensor_parallel > 1:
        return (
            f"{given} with policy.tensor_parallel={policy.tensor_parallel}: engines of several ranks are not quantised "
            "yet; leave one of them out."
        )
    if config.travelling_lora():
        return (
            f"{given} with learner.lora.rank={config.lora.rank}: quantised engines take no adapters; use "
            "weights.merge_adapters=true."
        )
    if policy.compile and not on_gpu:
        return f"{given} cannot be compiled on a CPU, where its layers are replaced; leave out policy.compile=true."
    dials = config.asynchrony
    if dials.correction == "none" and not dials.force_uncorrected:
        return (
            f"{given} with async.correction=none would train on another policy's samples as if they were the "
            "learner's; use async.correction=token_is or async.force_uncorrected=true."
        )
    return None


def routing_is_seen(config: Config) -> str | None:
    """A compiled model runs without the calls that tell which experts were chosen; other processes make them there."""
    ranks = config.policy.tensor_parallel
    if config.policy.keep_routing and ranks > 1:
        return (
            f"policy.keep_routing=true with policy.tensor_parallel={ranks}: engines of several ranks do not record "
            "routing yet; leave one of them out."
        )
    if config.policy.keep_routing and config.policy.compile:
        return "policy.keep_routing=true cannot see the routing of policy.compile=true; leave one of them out."
    return None


def completion_fits(config: Config) -> str | None:
    """The prompt needs room beside the completion."""
    new, most = config.sampling.max_new_tokens, config.policy.max_model_tokens
    if new >= most:
        return (
            f"sampling.max_new_tokens={new} leaves no room for a prompt in policy.max_model_tokens={most}; "
            f"use policy.max_model_tokens={round_up(2 * new, 32)} or so."
        )
    return None


def stop_strings_have_text(config: Config) -> str | None:
    """Every text contains the empty one."""
    if "" in config.sampling.stop:
        return "sampling.stop has an empty text, which would end every completion at once; leave it out."
    return None


def kept_set_fits(config: Config) -> str | None:
    """What top-k keeps travels with each token."""
    keeps, most = config.sampling.top_k, config.sampling.max_kept_tokens
    if keeps > most:
        return (
            f"sampling.top_k={keeps} keeps more than sampling.max_kept_tokens={most}; use "
            f"sampling.max_kept_tokens={keeps}, which costs up to {4 * keeps} bytes a token."
        )
    return None


def block_fits(config: Config) -> str | None:
    """The engine's attention takes blocks of 32 tokens' multiples on CPU, of 16's on GPU."""
    block, on_gpu = config.policy.block_tokens, config.job.gpus_per_host > 0
    unit, machine = (16, "a GPU") if on_gpu else (32, "CPU")
    if block % unit:
        remedy = f"use policy.block_tokens={round_up(block, unit)}."
        return f"policy.block_tokens={block} is no multiple of {unit}, as {machine} needs it; {remedy}"
    return None


def engine_step_fits(config: Config) -> str | None:
    """An engine step decodes at least one token of each sequence."""
    tokens, sequences = config.policy.max_batch_tokens, config.policy.max_sequences
    if tokens < sequences:
        return (
            f"policy.max_batch_tokens={tokens} is below policy.max_sequences={sequences}, one token each; "
            f"use policy.max_batch_tokens={sequences} or more."
        )
    return None


def concurrency_reads(config: Config) -> str | None:
    """The engine's concurrency is a word that the policy room knows."""
    try:
        concurrency_limit(config.policy.concurrency, config.policy.max_sequences)
    except ConfigError as error:
        return str(error)
    return None


POLICY_CHECKS: tuple[Callable[[Config], str | None], ...] = (
    adapters_can_travel,
    quantized_engine_can_be,
    routing_is_seen,
    completion_fits,
    stop_strings_have_text,
    kept_set_fits,
    block_fits,
    engine_step_fits,
    concurrency_reads,
)
"""In the order in which they are told."""


def round_up(number: int, unit: int) -> int:
    """The next multiple of `unit` from `number` on, to be named as a remedy."""
    return -(-number // unit) * unit
