"""A user's own objective: found by reference, loaded, and held to what it promises."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_async.core.errors import ConfigError, LearnerError
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.settings import ObjectiveSettings


def load_objective(reference: str) -> Callable[[LossInputs, ObjectiveSettings], TokenLoss]:
    """Load `file.py:function` or `package.module:function`, a function of (LossInputs, ObjectiveSettings).

    It returns the loss of each token, [B, L], as a tensor or a TokenLoss. Runs the user's module.

    Raises ConfigError, in one sentence, when the function is not there, its module cannot be imported, or it does not
    take two arguments.
    """
    place, _, name = reference.rpartition(":")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") or "/" in place else importlib.import_module(place)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"objective.name={reference} cannot be imported: {type(error).__name__}: {text or 'no message'}."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"objective.name={reference}: {place} defines no function {name or 'of that name'}.")
    _check_signature(reference, function)
    return _checked(reference, function)


def absolute_reference(name: str) -> str:
    """The reference with its file's path made absolute, for a process with another working directory."""
    place, colon, function = name.rpartition(":")
    if not colon or not (place.endswith(".py") or "/" in place):
        return name
    return f"{Path(place).absolute()}:{function}"


def _import_file(path: Path) -> Any:
    name = f"forge_objective_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def _check_signature(reference: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"objective.name={reference} must take two arguments: write def {reference.rpartition(':')[2]}"
            "(inputs: LossInputs, settings: ObjectiveSettings)."
        ) from error


def _checked(reference: str, function: Callable[..., Any]) -> Callable[[LossInputs, ObjectiveSettings], TokenLoss]:
    def checked(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
        found = function(inputs, settings)
        loss = found.loss if isinstance(found, TokenLoss) else found
        shape = tuple(getattr(loss, "shape", ()))
        if shape != tuple(inputs.logprobs.shape):
            raise LearnerError(
                f"objective.name={reference} returned {type(found).__name__} of shape {shape}; it must return the loss "
                f"of each token, shape {tuple(inputs.logprobs.shape)}."
            )
        return found if isinstance(found, TokenLoss) else TokenLoss(loss=loss)

    return checked
