"""A tiny Qwen3 (or Qwen3-MoE) with random weights and a character tokenizer: what a warm start begins from.

Run as a program in a process of its own, since it imports torch:
`python -m forge_async.backends.tiny_model FOLDER SHAPE`, where SHAPE is the JSON of a TinyShape.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_async.backends.hf_renderer import BOS_ID, CHARACTERS, EOS_ID, PAD_ID, write_char_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """Sizes of a tiny model."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 32
    """The smallest that the engine's attention serves."""
    ffn: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyMixture(TinyShape):
    """Sizes of a tiny mixture of experts, in every layer."""

    experts: int
    experts_per_token: int
    expert_ffn: int


def write_tiny_model(folder: Path, shape: TinyShape) -> None:
    """Write a Hugging Face folder with random weights: normal, standard deviation 0.02, norms 1."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(shape.seed)
    is_mixture = isinstance(shape, TinyMixture)
    config_class: Any = Qwen3MoeConfig if is_mixture else Qwen3Config
    config = config_class(
        **(_mixture(shape) if is_mixture else {}),
        vocab_size=len(CHARACTERS) + 3,
        hidden_size=shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.ffn,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        tie_word_embeddings=True,
        initializer_range=0.02,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    write_char_tokenizer(folder)


def _mixture(shape: TinyMixture) -> dict[str, Any]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_ffn,
        "norm_topk_prob": True,
    }


def to_json(shape: TinyShape) -> str:
    """The shape as the program's second argument."""
    return json.dumps(asdict(shape))


if __name__ == "__main__":
    sizes = json.loads(sys.argv[2])
    write_tiny_model(Path(sys.argv[1]), TinyMixture(**sizes) if "experts" in sizes else TinyShape(**sizes))
