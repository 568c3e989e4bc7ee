"""Command lines of the small applications: argparse, but what is wrong is told in one sentence."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from forge_async.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError (exit 2) with the fault and the usage instead of printing a page and exiting by itself."""

    def error(self, message: str) -> NoReturn:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        raise ConfigError(f"{message}; usage: {usage}")


def path(text: str) -> Path:
    """An argument that is a path: absolute, `~` expanded."""
    return Path(text).expanduser().resolve()
