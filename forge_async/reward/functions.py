"""User reward functions: found by reference, loaded, and called with the arguments that they accept."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_async.core.errors import ConfigError

FORMS = "package.module:function or file.py:function"


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
        return offered if self.accepts is None else {key: offered[key] for key in offered if key in self.accepts}

    def missing(self, data: Mapping[str, Any]) -> list[str]:
        """Required parameters that neither `data` nor our own names provide."""
        return sorted(self.required - data.keys() - {"prompt", "completion", "truncated"})


def absolute_reference(reference: str) -> str:
    """The reference with its file path, if it has one, made absolute, for a process with another working directory.

    Raises ConfigError when `reference` has not one of the two forms.
    """
    target, function = _split(reference)
    return f"{Path(target).expanduser().absolute()}:{function}" if _is_file(target) else reference


def load_function(reference: str) -> RewardFunction:
    """Load `package.module:function` or `file.py:function`, plain or `async def`.

    Raises ConfigError, in one sentence, when there is no such file, module or function, when importing it fails, or
    when the function cannot take a completion. Runs the user's module: call it in a worker process.
    """
    target, function_name = _split(reference)
    module = _import_file(Path(target)) if _is_file(target) else _import_module(target)
    function = getattr(module, function_name, None)
    if function is None:
        raise ConfigError(
            f"reward={reference}: {target} has no function {function_name}{_known(module, function_name)}."
        )
    if not callable(function):
        raise ConfigError(f"reward={reference}: {function_name} is a {type(function).__name__}, not a function.")
    return _describe(reference, function)


def _split(reference: str) -> tuple[str, str]:
    target, _, function = reference.rpartition(":")
    if not target or not function.isidentifier():
        raise ConfigError(f"reward={reference} does not name a function: write {FORMS}.")
    return target, function


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"reward file {path} does not exist or is not a file.")
    name = f"forge_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward file {path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.absolute().parent))  # so that it can import its neighbours
    loader = spec.loader
    _run_import(lambda: loader.exec_module(module), f"file {path}")
    return module


def _import_module(name: str) -> ModuleType:
    return _run_import(lambda: importlib.import_module(name), f"module {name}")


def _run_import(run: Callable[[], Any], what: str) -> Any:
    try:
        return run()
    except ConfigError:
        raise  # already a sentence of ours, such as a missing package of a built-in task
    except BaseException as error:  # noqa: BLE001  user code may raise anything, SystemExit too
        text = " ".join(str(error).split())
        raise ConfigError(
            f"reward {what} cannot be imported: {type(error).__name__}: {text or 'no message'}"
        ) from error


def _known(module: ModuleType, wanted: str) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    near = difflib.get_close_matches(wanted, names, n=1)
    if near:
        return f"; did you mean {near[0]}"
    return f"; it has {', '.join(sorted(names))}" if names else ""


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
