"""What a model's config.json says of its sizes, read without torch, and what follows for parameters and memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_async.core.errors import ConfigError
from forge_async.learner.mixture import has_experts, num_experts

ARCHITECTURES = ("qwen3", "qwen3_moe", "llama")
"""Values of `model_type` that the learner can train; `backends/titan_models.py` builds them."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer."""

    kind: str
    """`model_type` of config.json."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Longest sequence that the model was made for, in tokens."""
    tied: bool
    """Whether the head shares the embedding's weights."""
    num_experts: int = 0
    """Experts of a layer that has them; 0: the model is dense."""
    expert_size: int = 0
    """Intermediate size of one expert."""
    num_expert_layers: int = 0
    """Layers with experts in place of one feed-forward network."""

    @property
    def num_parameters(self) -> int:
        """Of the whole model, shared ones counted once."""
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.kind.startswith("qwen3") else 0)
        dense = 3 * self.hidden_size * self.intermediate_size
        mixture = self.num_experts * self.hidden_size * (3 * self.expert_size + 1)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        layers = self.num_layers * (attention + norms + dense) + self.num_expert_layers * (mixture - dense)
        return embeddings + layers + self.hidden_size

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def read_shape(folder: Path, name: str = "") -> ModelShape:
    """Read config.json of a Hugging Face folder.

    Args:
        folder: the model's.
        name: what the user calls it, for messages.

    Raises ConfigError when it cannot be read, or the learner cannot train such a model.
    """
    name = name or str(folder)
    config = _read(folder / "config.json", name)
    _check_architecture(config, name)
    try:
        return _shape(config)
    except (KeyError, TypeError, ValueError) as error:
        what = f"gives no {error}" if isinstance(error, KeyError) else f"cannot be understood ({error})"
        raise ConfigError(f"model.path={name}: {folder / 'config.json'} {what}; give a Hugging Face model.") from error


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={name} has no config.json; give a Hugging Face model folder.") from error
    except OSError as error:
        raise ConfigError(f"model.path={name}: {path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise ConfigError(f"model.path={name}: {path} is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model.path={name}: {path} holds no object; give a Hugging Face model folder.")
    return config


def _shape(config: dict[str, Any]) -> ModelShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return ModelShape(
        kind=config["model_type"],
        num_layers=int(config["num_hidden_layers"]),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab_size=int(config["vocab_size"]),
        max_positions=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings")),
        **(_mixture(config) if config["model_type"] == "qwen3_moe" else {}),
    )


def _mixture(config: dict[str, Any]) -> dict[str, int]:
    layers = range(int(config["num_hidden_layers"]))
    return {
        "num_experts": num_experts(config),
        "expert_size": int(config["moe_intermediate_size"]),
        "num_expert_layers": sum(has_experts(config, layer) for layer in layers),
    }


def _check_architecture(config: dict[str, Any], name: str) -> None:
    """Refuse what torchtitan's models, as they are built here, would compute otherwise than transformers."""
    kind = config.get("model_type", "")
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"model.path={name} holds a model of type {kind!r}, which the learner cannot train; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type") or rope.get("type") or "default"
    allowed = ("default", "llama3") if kind == "llama" else ("default",)
    if scaling not in allowed:
        raise ConfigError(
            f"model.path={name} scales its rotary embedding by {scaling!r}, which the learner does not compute for "
            f"{kind}; it knows {' and '.join(allowed)}."
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise ConfigError(f"model.path={name} has {key}=true, which the learner does not compute; give another.")
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
    if kind == "llama" and heads and head_dim and heads * head_dim != config.get("hidden_size"):
        raise ConfigError(
            f"model.path={name}: its {heads} heads of head_dim={head_dim} do not make up its hidden_size="
            f"{config.get('hidden_size')}, which the learner needs of a llama; give another."
        )
