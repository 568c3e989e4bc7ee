"""What exists as a word but does not run yet: one table, which shrinks as features land."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_async.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class NotBuilt:
    """A key of which only some values work today. When a feature lands, its line here goes or grows."""

    key: str
    """Dotted key."""
    allowed: tuple[Any, ...]
    """Values that work."""
    why: str = ""
    """Reason, where it is not just time."""

    def problem(self, config: Config) -> str | None:
        """Return the sentence when `config` asks for what is not built."""
        value = config.value(self.key)
        if value in self.allowed:
            return None
        why, words = f" ({self.why})" if self.why else "", " or ".join(_word(item) for item in self.allowed)
        return f"{self.key}={_word(value)} is not built yet{why}; use {self.key}={words}."


NOT_BUILT: tuple[NotBuilt, ...] = (
    NotBuilt(key="weights.transport", allowed=("auto", "shm", "rpc", "filesystem", "http", "broadcast")),
)
"""The one list of what exists as a word but does not run yet."""


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
