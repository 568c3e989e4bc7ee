"""From a Hugging Face folder to a torchtitan model: which architectures, with which names and sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_async.backends import titan_moe  # before any other part of torchtitan
from forge_async.backends.titan_attention import attention_config
from forge_async.core.errors import ConfigError

# isort: split
import torch
from torchtitan.models import llama3, qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.protocols.model_spec import ModelSpec

ATTENTION = "varlen"


class Llama3Adapter(qwen3.Qwen3StateDictAdapter):
    """Names of Llama as Hugging Face writes them, with the rows of q and k left in Hugging Face's order.

    torchtitan's own adapter permutes those rows for its complex-number rotary embedding, which fails on shards whose
    count does not divide the heads. With the cosine-sine form no permutation is needed.
    """


class Llama3RoPE(CosSinRoPE):
    """Cosine-sine rotary embedding with Llama 3's frequency scaling (Llama 3.1 model card; Hugging Face `llama3`)."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        """As the base class; `scaling="llama"` is allowed here."""

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            return super()._precompute_cache()
        half = torch.arange(0, config.dim, 2)[: config.dim // 2].float() / config.dim
        frequency = 1.0 / (config.theta**half)
        turns = config.original_max_position_embeddings * frequency / (2 * torch.pi)
        blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequency = frequency * (blend + (1 - blend) / config.scaling_factor)
        angle = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device=frequency.device), frequency)
        angle = torch.cat([angle, angle], dim=-1)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError when it is missing or is not JSON."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"model.path={folder} has no config.json; give a Hugging Face model folder.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error


def model_spec(folder: Path) -> ModelSpec:
    """Build torchtitan's description of the model in a Hugging Face folder.

    Raises ConfigError for an architecture that is not supported.
    """
    config = read_config(folder)
    builders = {"qwen3": _qwen3_spec, "llama": _llama_spec, "qwen3_moe": _qwen3_spec}
    kind = config.get("model_type", "")
    if kind not in builders:
        raise ConfigError(
            f"model.path={folder} holds a model of type {kind!r}, which the learner cannot train; "
            f"supported are {', '.join(builders)}."
        )
    spec = builders[kind](config)
    for layer in spec.model.layers:  # pyright: ignore[reportAttributeAccessIssue]
        layer.attention.inner_attention = attention_config()
    return spec


def _rope_theta(config: dict[str, Any]) -> float:
    return float((config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _embeddings(config: dict[str, Any], package: Any) -> dict[str, Any]:
    """Token embedding, final norm and head, which both architectures share but for their initialisers."""
    vocabulary, dim, tied = config["vocab_size"], config["hidden_size"], bool(config.get("tie_word_embeddings"))
    return {
        "vocab_size": vocabulary,
        "dim": dim,
        "enable_weight_tying": tied,
        "tok_embeddings": Embedding.Config(
            num_embeddings=vocabulary,
            embedding_dim=dim,
            param_init=package._EMBEDDING_SKIP_INIT if tied else package._EMBEDDING_INIT,
        ),
        "lm_head": Linear.Config(in_features=dim, out_features=vocabulary, param_init=package._LINEAR_INIT),
    }


def _qwen3_spec(config: dict[str, Any]) -> ModelSpec:
    dim = config["hidden_size"]
    head_dim = config.get("head_dim") or dim // config["num_attention_heads"]
    common = {
        "n_layers": config["num_hidden_layers"],
        "dim": dim,
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "head_dim": head_dim,
        "fuse_qkv": False,
        "attn_backend": ATTENTION,
        "rope": CosSinRoPE.Config(
            dim=head_dim, max_seq_len=config["max_position_embeddings"], theta=_rope_theta(config)
        ),
    }
    layers: list[Any] = list(qwen3._build_qwen3_layers(**common, hidden_dim=config["intermediate_size"]))
    if config["model_type"] == "qwen3_moe":
        layers = titan_moe.moe_layers(config, common, layers)
    model = qwen3.Qwen3Model.Config(layers=layers, norm=qwen3._qwen3_norm(dim), **_embeddings(config, qwen3))
    return _spec("qwen3", model, config, qwen3.parallelize_qwen3, qwen3.Qwen3StateDictAdapter)


def _llama_rope(config: dict[str, Any], head_dim: int) -> Any:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    common = {"dim": head_dim, "max_seq_len": config["max_position_embeddings"], "theta": _rope_theta(config)}
    kind = scaling.get("rope_type", "default")
    if kind == "default":
        return CosSinRoPE.Config(**common)
    if kind != "llama3":
        raise ConfigError(
            f"This Llama uses rotary scaling {kind!r}, which is not supported; supported: default, llama3."
        )
    return Llama3RoPE.Config(
        **common,
        scaling="llama",
        scaling_factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
    )


def _llama_spec(config: dict[str, Any]) -> ModelSpec:
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // heads
    if head_dim * heads != dim or config.get("attention_bias") or config.get("mlp_bias"):
        raise ConfigError("This Llama has biases or a head_dim other than hidden_size / num_attention_heads, "
                          "which torchtitan's llama3 does not support.")  # fmt: skip
    layers = llama3._build_llama3_layers(
        n_layers=config["num_hidden_layers"],
        dim=dim,
        n_heads=heads,
        n_kv_heads=config.get("num_key_value_heads", heads),
        hidden_dim=config["intermediate_size"],
        rope=_llama_rope(config, head_dim),
        fuse_qkv=False,
        attn_backend=ATTENTION,
    )
    norm = llama3.RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT)
    model = llama3.Llama3Model.Config(layers=layers, norm=norm, **_embeddings(config, llama3))
    return _spec("llama3", model, config, llama3.parallelize_llama, Llama3Adapter)


def _spec(name: str, model: Any, config: dict[str, Any], parallelize: Callable, adapter: type) -> ModelSpec:
    _set_epsilon(model, config)
    return ModelSpec(
        name=name,
        flavor="from_hugging_face",
        model=model,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=adapter,
    )


def _set_epsilon(model: Any, config: dict[str, Any]) -> None:
    """Every norm takes the epsilon that the model was trained with."""
    epsilon = float(config.get("rms_norm_eps", 1e-6))
    model.norm.eps = epsilon
    for layer in model.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = epsilon
        if layer.attention.qk_norm is not None:
            layer.attention.qk_norm.eps = epsilon
