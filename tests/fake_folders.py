"""Hugging Face folders without weights worth the name: what can be checked of a model before anything starts."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 98,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def fake_model(folder: Path, config: dict[str, Any] = QWEN3, **changes: Any) -> Path:
    """Write a folder with config.json, the character tokenizer and an empty safetensors file; None removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    for file in _char_tokenizer().iterdir():
        shutil.copy(file, folder)
    (folder / "model.safetensors").touch()
    return folder


@cache
def _char_tokenizer() -> Path:
    from forge_async.backends.hf_renderer import write_char_tokenizer

    folder = Path(mkdtemp(prefix="char-tokenizer-"))
    write_char_tokenizer(folder)
    return folder
