"""Functions of the user's own: found by reference, `package.module:function` or `file.py:function`, and loaded."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from forge_async.core.errors import ConfigError

FORMS = "package.module:function or file.py:function"


def absolute_reference(reference: str) -> str:
    """The reference with its file path, if it has one, made absolute, for a process with another working directory.

    What is no reference to a file is returned as it is.
    """
    target, _, function = reference.rpartition(":")
    return f"{Path(target).expanduser().absolute()}:{function}" if _is_file(target) else reference


def check_reference(reference: str, key: str) -> tuple[str, str]:
    """Module or file, and function. Raises ConfigError when `reference` has not one of the two forms."""
    target, _, function = reference.rpartition(":")
    if not target or not function.isidentifier():
        raise ConfigError(f"{key}={reference} does not name a function: write {FORMS}.")
    return target, function


def load_callable(reference: str, key: str) -> Callable[..., Any]:
    """Load a function, or anything else that can be called. Runs the user's module.

    Args:
        reference: in one of the two forms.
        key: of the configuration, for messages.

    Raises ConfigError, in one sentence, when there is no such file, module or function, or when importing it fails.
    """
    target, name = check_reference(reference, key)
    module = _import_file(Path(target), key) if _is_file(target) else _import_module(target, key)
    function = getattr(module, name, None)
    if function is None:
        raise ConfigError(f"{key}={reference}: {target} has no function {name}{_known(module, name)}.")
    if not callable(function):
        raise ConfigError(f"{key}={reference}: {name} is a {type(function).__name__}, not a function.")
    return function


def _is_file(target: str) -> bool:
    return target.endswith(".py") or "/" in target


def _import_file(path: Path, key: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{key} file {path} does not exist or is not a file.")
    name = f"forge_async_user_{key.replace('.', '_')}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key} file {path} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up by name
    sys.path.insert(0, str(path.absolute().parent))  # so that it can import its neighbours
    loader = spec.loader
    _run_import(lambda: loader.exec_module(module), f"{key} file {path}")
    return module


def _import_module(name: str, key: str) -> ModuleType:
    return _run_import(lambda: importlib.import_module(name), f"{key} module {name}")


def _run_import(run: Callable[[], Any], what: str) -> Any:
    try:
        return run()
    except ConfigError:
        raise  # already a sentence of ours, such as a missing package of a built-in task
    except BaseException as error:  # noqa: BLE001  user code may raise anything, SystemExit too
        text = " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be imported: {type(error).__name__}: {text or 'no message'}") from error


def _known(module: ModuleType, wanted: str) -> str:
    names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    near = difflib.get_close_matches(wanted, names, n=1)
    if near:
        return f"; did you mean {near[0]}"
    return f"; it has {', '.join(sorted(names))}" if names else ""
