"""User reward functions: found by reference, loaded, and called with the arguments that they accept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_async.core.errors import ConfigError
from forge_async.core.user_code import load_callable

OWN_NAMES = frozenset({"prompt", "completion", "truncated"})
"""What every call is offered beside the prompt's data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A loaded function `score(completion, ...)` and what its signature says."""

    name: str
    """The reference it was loaded from."""
    call: Callable[..., Any]
    is_async: bool
    accepts: frozenset[str] | None
    """Names of its parameters; None when it takes any (`**data`)."""
    required: frozenset[str]
    """Names of the parameters without default."""

    def arguments(self, prompt: str, completion: str, data: Mapping[str, Any], truncated: bool) -> dict[str, Any]:
        """Keyword arguments of one call: what the function accepts of the prompt's data and our three own names."""
        offered = {**data, "prompt": prompt, "completion": completion, "truncated": truncated}
        return offered if self.accepts is None else {key: offered[key] for key in self.accepts if key in offered}

    def missing(self, data: Mapping[str, Any]) -> list[str]:
        """Required parameters that neither `data` nor our own names provide."""
        return [] if self.required <= OWN_NAMES | data.keys() else sorted(self.required - OWN_NAMES - data.keys())


def load_function(reference: str) -> RewardFunction:
    """Load `package.module:function` or `file.py:function`, plain or `async def`.

    Raises ConfigError, in one sentence, when there is no such file, module or function, when importing it fails, or
    when the function cannot take a completion. Runs the user's module: call it in a worker process.
    """
    return _describe(reference, load_callable(reference, "reward"))


def _describe(reference: str, function: Callable[..., Any]) -> RewardFunction:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward={reference} has no readable signature: wrap it in a Python function.") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_any and "completion" not in {p.name for p in named}:
        raise ConfigError(
            f"reward={reference} takes ({', '.join(p.name for p in named)}) but must take a parameter named "
            "completion: write, for example, def score(prompt, completion, **data)."
        )
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return RewardFunction(
        name=reference,
        call=function,
        is_async=is_async,
        accepts=None if takes_any else frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
    )
