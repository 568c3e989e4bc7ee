"""Settings of the model, the learner, its optimiser and its objective."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Keys under `model`."""

    path: str = setting(
        "", "Hugging Face folder or hub name; empty: the tiny warm start of the task, made once and cached"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Keys under `learner`."""

    ranks: int = setting(1, "learner processes; parameters are sharded over them (FSDP2)", low=1)
    tensor_parallel: int = setting(1, "ranks of a tensor-parallel group; divides learner.ranks", low=1)
    expert_parallel: int = setting(1, "ranks over which experts are spread; divides learner.ranks", low=1)
    dtype: str = setting("float32", "dtype of the forward and backward pass", choices=("float32", "bfloat16"))
    row_tokens: int = setting(64, "tokens of a packed row; grows to the longest sample", unit="tokens", low=8)
    micro_batch_tokens: int = setting(2048, "tokens of one forward and backward pass on a rank", unit="tokens", low=8)
    activation_checkpointing: str = setting(
        "none", "recompute activations in the backward pass", choices=("none", "selective", "full")
    )
    compile: bool = setting(False, "compile the model; slower to start")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Keys under `optimizer` (AdamW)."""

    lr: float = setting(6e-4, "learning rate after warm-up", low=0.0)
    warmup_steps: int = setting(20, "steps of linear warm-up", unit="steps", low=0)
    decay: str = setting("linear", "what follows the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_factor: float = setting(0.1, "share of lr that a decay ends at", low=0.0, high=1.0)
    beta1: float = setting(0.9, "first moment's decay", low=0.0, high=1.0)
    beta2: float = setting(0.95, "second moment's decay", low=0.0, high=1.0)
    weight_decay: float = setting(0.0, "decoupled weight decay", low=0.0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm", low=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Keys under `objective`."""

    name: str = setting("grpo", "the objective", choices=("grpo",))
    clip_low: float = setting(0.2, "the ratio is clipped below 1 - clip_low", low=0.0, high=1.0)
    clip_high: float = setting(0.28, "the ratio is clipped above 1 + clip_high", low=0.0)
