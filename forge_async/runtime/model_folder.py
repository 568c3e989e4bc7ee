"""From `model.path` to a folder on this machine: the warm start, a converted package, a local folder, or the hub."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from forge_async.backends import smollm2
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.core.packages import require

HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
ALTERNATIVES = "give a Hugging Face folder, a hub name such as Qwen/Qwen3-0.6B, or smollm2"


def resolve_model(config: Config, say: Callable[[str], None] = print) -> Path:
    """The Hugging Face folder that a run starts from, made or fetched if need be.

    `model.path` is, in this order: empty (the tiny warm start of the task), `smollm2`, a folder here, a hub name.

    Args:
        config: checked configuration.
        say: is given a line for people before something that takes long.

    Raises ConfigError when there is no such model or it has no safetensors, MissingPackageError when a package that
    fetches or converts it is missing.
    """
    path = config.model.path
    if not path:
        from forge_async.runtime.warm_start import ensure_warm_start

        return ensure_warm_start(config, say)
    if path == smollm2.NAME:
        return _converted_smollm2(say)
    return _with_weights(path, _local(path) or _from_hub(path))


def find_model(config: Config) -> Path | None:
    """The folder if it is at hand, else None; nothing is made or fetched."""
    path = config.model.path
    if not path:
        from forge_async.runtime.warm_start import find_warm_start

        return find_warm_start(config)
    if path == smollm2.NAME:
        folder = smollm2.cached_folder()
        return folder if smollm2.is_converted(folder) else None
    return _local(path) or _from_hub_cache(path)


def _local(path: str) -> Path | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"model.path={path} is a file, not a folder; {ALTERNATIVES}.")
    if not HUB_NAME.fullmatch(path):
        raise ConfigError(f"model.path={path} does not exist; {ALTERNATIVES}.")
    return None


def _with_weights(path: str, folder: Path) -> Path:
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path={path} has no .safetensors file in {folder}; convert the model to safetensors.")
    return folder


def _converted_smollm2(say: Callable[[str], None]) -> Path:
    """The converted model in the cache. A process of its own converts, so that this one does not import torch."""
    folder = smollm2.cached_folder()
    if smollm2.is_converted(folder):
        return folder
    smollm2.check_packages()
    say(f"converting SmolLM2-135M-Instruct to {folder} (once, half a minute)")
    child = subprocess.run([sys.executable, "-m", smollm2.__name__, str(folder)], capture_output=True, text=True)
    if smollm2.is_converted(folder):  # also when another run was faster
        return folder
    cause = (child.stderr.strip().splitlines() or [f"the converter ended with code {child.returncode}"])[-1]
    raise ConfigError(f"model.path={smollm2.NAME} could not be converted: {cause}")


def _from_hub(name: str) -> Path:
    """The hub's snapshot, from the local cache or fetched; HF_HUB_OFFLINE and the hub's other variables apply."""
    require("huggingface_hub", feature=f"model.path={name}, which is no folder here,")
    from huggingface_hub import constants, errors, snapshot_download

    try:
        # Only files at the top: folders hold the same weights in other formats.
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except errors.GatedRepoError as error:
        cause, remedy = "the hub asks for a log-in for it", "run `hf auth login` with an account that was given access"
        raise _not_given(name, cause, remedy) from error
    except errors.RepositoryNotFoundError as error:
        raise _not_given(name, "the hub has no public model of this name", ALTERNATIVES) from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            cause, remedy = "HF_HUB_OFFLINE keeps it from being fetched", "unset HF_HUB_OFFLINE, or give a folder"
        else:
            cause, remedy = "the hub cannot be reached", "look at the network, or give a folder"
        raise _not_given(name, f"it is not in the local cache, and {cause}", remedy) from error
    except Exception as error:  # noqa: BLE001  network and permission errors of several libraries: no model either way
        raise _not_given(name, " ".join(str(error).split())[:200], ALTERNATIVES) from error


def _not_given(name: str, cause: str, remedy: str) -> ConfigError:
    return ConfigError(f"model.path={name} is no folder here, and cannot come from the hub: {cause}; {remedy}.")


def _from_hub_cache(name: str) -> Path | None:
    require("huggingface_hub", feature=f"model.path={name}, which is no folder here,")
    from huggingface_hub import errors, snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, local_files_only=True))
    except errors.LocalEntryNotFoundError:
        return None
    return folder if any(folder.glob("*.safetensors")) else None
