"""Writes a folder that others read as a model: weights, or an adapter for PEFT, beside what the source folder says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from forge_async.weights.adapters import PEFT_CONFIG, PEFT_WEIGHTS

TOKENIZER_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip


def write_model(folder: Path, source: Path, weights: Mapping[str, Any], adapter: Mapping[str, Any]) -> None:
    """Write `folder`, whole or not at all.

    Args:
        source: the folder whose configuration and tokenizer go with the weights.
        weights: name to tensor, as the file should have them.
        adapter: PEFT's configuration when the weights are an adapter, else empty.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, partial / name)
    file = PEFT_WEIGHTS if adapter else "model.safetensors"
    save_file(dict(weights), partial / file, metadata={"format": "pt"})
    if adapter:
        (partial / PEFT_CONFIG).write_text(json.dumps(adapter, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
