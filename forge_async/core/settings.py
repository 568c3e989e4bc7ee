"""How a room declares its settings: a field with default, one line of documentation, unit and range.

Each room owns a frozen dataclass of such fields; `config/` composes them, prints them for `--help` and checks them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from forge_async.core.errors import ConfigError


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    words: Sequence[str] = (),
) -> Any:
    """A dataclass field with its documentation.

    Args:
        default: value when the user says nothing; a list or dict is copied for each instance.
        doc: one line for `--help`.
        unit: unit of a number ("s", "tokens", "bytes", "steps"), "" when it has none.
        low, high: inclusive range of a number.
        choices: the allowed words of a string.
        words: words that a number may be given as instead.
    """
    metadata = {"doc": doc, "unit": unit, "low": low, "high": high, "choices": tuple(choices), "words": tuple(words)}
    if isinstance(default, (list, dict)):
        factory: Callable[[], Any] = lambda: type(default)(default)  # noqa: E731
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_ranges(settings: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first field of the dataclass instance `settings` that lies outside its range."""
    for field in dataclasses.fields(settings):
        _check_field(f"{prefix}{field.name}", getattr(settings, field.name), field.metadata)


def _check_field(key: str, value: Any, metadata: Any) -> None:
    choices, low, high = metadata.get("choices"), metadata.get("low"), metadata.get("high")
    if choices and value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")
    words = metadata.get("words")
    if words and isinstance(value, str) and value not in words:
        raise ConfigError(f"{key}={value} is neither a number nor {' or '.join(words)}; give one of them.")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if math.isnan(value):
        raise ConfigError(f"{key}={value} is not a number.")
    unit = f" {metadata['unit']}" if metadata.get("unit") else ""
    if low is not None and value < low:
        raise ConfigError(f"{key}={value} is below its least value {low:g}{unit}; give {low:g} or more.")
    if high is not None and value > high:
        raise ConfigError(f"{key}={value} is above its greatest value {high:g}{unit}; give {high:g} or less.")
