"""Composes the rooms' settings; loads, checks and explains a configuration."""

from forge_async.config.checks import check, problems
from forge_async.config.loading import Options, compose, from_file, load
from forge_async.config.schema import Config

__all__ = ["Config", "Options", "check", "compose", "from_file", "load", "problems"]
