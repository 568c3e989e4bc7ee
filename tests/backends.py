"""Real backends as the contract suites want them; called inside a `Child`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def vllm_engine(folder: str, **policy: Any) -> Any:
    """A vLLM engine for tiny models; `policy`: settings that differ."""
    from forge_async.backends.vllm_engine import VllmEngine
    from forge_async.core.versions import PolicyVersion
    from forge_async.policy.settings import PolicySettings

    sizes = {"max_model_tokens": 128, "max_sequences": 64, "max_batch_tokens": 1024, "kv_cache_bytes": 4 << 20}
    settings = PolicySettings(**(sizes | policy))
    return _TestedEngine(VllmEngine(folder, settings, PolicyVersion()))


class _TestedEngine:
    """The engine, and what a test does to it behind its back."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def load_as_vllm_does(self, weights: dict[str, Any]) -> None:
        """vLLM's own loading, once the engine has run."""
        self._engine._model().load_weights(iter(weights.items()))


def titan_learner(
    folder: str,
    port: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    row_tokens: int = 64,
    micro_batch_tokens: int = 8192,
    logit_chunk_tokens: int = 2048,
    packed: bool = True,
    lr: float = 1e-3,
    temperature: float = 1.0,
    publish_dtype: str = "float32",
    objective: dict[str, Any] | None = None,
    correction: str = "token_is",
    updates_per_batch: int = 1,
    expert_parallel: int = 1,
    dtype: str = "float32",
    activation_checkpointing: str = "none",
) -> Any:
    """A rank of a torchtitan learner; one made before in this process is closed."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss
    from forge_async.learner.settings import LearnerSettings, ObjectiveSettings, OptimizerSettings

    if _learners:
        _learners.pop().close()
    learner = TitanLearner(
        Path(folder),
        loss=objective_loss(ObjectiveSettings(**(objective or {})), correction),
        learner=LearnerSettings(
            ranks=ranks,
            row_tokens=row_tokens,
            micro_batch_tokens=micro_batch_tokens,
            logit_chunk_tokens=logit_chunk_tokens,
            packed=packed,
            updates_per_batch=updates_per_batch,
            expert_parallel=expert_parallel,
            dtype=dtype,
            activation_checkpointing=activation_checkpointing,
        ),
        optimizer=OptimizerSettings(lr=lr, warmup_steps=0),
        total_steps=10,
        seed=0,
        temperature=temperature,
        publish_dtype=publish_dtype,
    )
    _learners.append(learner)
    return learner


_learners: list[Any] = []


class LearnerState:
    """What the learner that was built last in this process keeps."""

    def __init__(self) -> None:
        state = _learners[-1]._model.state_dict()
        tied = {"lm_head.weight"} if _learners[-1]._model.enable_weight_tying else set()
        self.names = sorted(state)
        self.num_elements = sum(value.numel() for name, value in state.items() if name not in tied)


def state_of_learner() -> LearnerState:
    """Its names and their sizes."""
    return LearnerState()
