"""vLLM with the weights of a Hugging Face folder, for what runs without a learner: talk, evaluation, comparison."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge_async.core.errors import ConfigError
from forge_async.core.packages import require
from forge_async.core.versions import PolicyVersion
from forge_async.policy.settings import PolicySettings
from forge_async.weights.adapters import base_folder, is_peft_folder, merge_all, read_peft


def build(folder: Path, settings: PolicySettings, version: PolicyVersion) -> Any:
    """The engine, serving the folder's weights as `version`. Call it on the thread that will use the engine.

    Raises ConfigError when the folder has no weights that can be read, MissingPackageError without a package.
    """
    require("safetensors", feature="Reading a model")
    _quieten()
    from forge_async.backends.vllm_engine import VllmEngine

    engine = VllmEngine(str(folder), settings, version)
    engine.load(dict(weights_of(folder)), version)
    return engine


def _quieten() -> None:
    """Before torch and vLLM are imported: one thread (two on busy cores are slower), and no warnings of theirs."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("VLLM_CONFIGURE_LOGGING", "0"), ("TORCH_CPP_LOG_LEVEL", "ERROR")):
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def weights_of(folder: Path) -> Iterable[tuple[str, Any]]:
    """(Hugging Face name, tensor) of all its safetensors files. Raises ConfigError for none, or a damaged one.

    Of a folder with an adapter: the weights of its model with the adapter added in.
    """
    from safetensors.torch import load_file

    if is_peft_folder(folder):
        yield from merge_all(dict(weights_of(base_folder(folder))), read_peft(folder)).items()
        return
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{folder} has no .safetensors file; convert the model to safetensors first.")
    for file in files:
        try:
            yield from load_file(file).items()
        except Exception as error:  # noqa: BLE001  safetensors has an error of its own for a damaged file
            raise ConfigError(f"{file} cannot be read as safetensors: {error}.") from error
