"""Settings of the policy's engine and of sampling."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting
from forge_async.policy.ports import Sampling

QUANTIZE = ("none", "int8", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Keys under `policy`."""

    replicas: int = setting(1, "engines serving the policy", low=1)
    tensor_parallel: int = setting(1, "ranks of each engine", low=1)
    threads: int = setting(1, "threads that each rank of an engine computes with on a CPU", low=1)
    dtype: str = setting("float32", "dtype the engine computes in", choices=("float32", "bfloat16", "float16"))
    quantize: str = setting(
        "none",
        "format in which the engine keeps and computes its linear layers, made anew from each version: int8, or fp8 on "
        "a GPU; what it samples then differs from the learner's policy, which async.correction sees to",
        choices=QUANTIZE,
    )
    max_model_tokens: int = setting(64, "longest prompt and completion together", unit="tokens", low=8)
    max_sequences: int = setting(512, "sequences that an engine decodes together", low=1)
    concurrency: str = setting(
        "all",
        "sequences handed to an engine at once: all, a number, or auto (found by what the KV cache bears)",
    )
    max_batch_tokens: int = setting(8192, "tokens of one engine step", unit="tokens", low=32)
    kv_cache_bytes: int = setting(64 << 20, "memory of the engine's KV cache", unit="bytes", low=1 << 20)
    block_tokens: int = setting(32, "tokens of a KV block; a multiple of 32 on CPU", unit="tokens", low=16)
    prefix_cache: bool = setting(True, "reuse the KV of equal prompt prefixes made by the same version")
    compile: bool = setting(False, "compile the engine's model; slower to start, and `bench compile` says when it pays")
    keep_routing: bool = setting(
        False,
        "mixtures of experts: record which experts each token took while it was sampled, and have the learner's tokens "
        "take the same; one byte for each layer and expert of a token travels with it",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Keys under `sampling`."""

    temperature: float = setting(1.0, "sampling temperature", low=0.01)
    max_new_tokens: int = setting(6, "longest completion of one turn", unit="tokens", low=1)
    top_p: float = setting(1.0, "nucleus sampling; 1: off", low=0.01, high=1.0)
    top_k: int = setting(0, "sample among the k likeliest tokens; 0: off, or max_kept_tokens beside top_p", low=0)
    max_kept_tokens: int = setting(
        64, "most tokens that top_p or top_k may keep; 4 bytes for each travel with a sampled token", low=1
    )
    stop: list[str] = setting([], "texts that end a completion, beside the model's end tokens; they stay in it")

    @property
    def effective_top_k(self) -> int:
        """What the sampler is told. Top-p alone has no bound on what it keeps: it gets `max_kept_tokens` for one."""
        return self.top_k or (self.max_kept_tokens if self.top_p < 1 else 0)

    def until(self, stop_token_ids: tuple[int, ...]) -> Sampling:
        """These settings for completions that end with one of the given tokens."""
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.effective_top_k,
            stop_token_ids=stop_token_ids,
            stop_strings=tuple(self.stop),
        )
