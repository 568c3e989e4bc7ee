"""From `model.path` to a folder on this machine."""

from __future__ import annotations

from pathlib import Path

from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError


def resolve_model(config: Config) -> Path:
    """The Hugging Face folder that a run starts from."""
    path = config.model.path
    if not path:
        raise ConfigError("the warm start is made by apps.sft; not wired yet")
    return Path(path).expanduser().resolve()
