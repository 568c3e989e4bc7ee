"""A user's own objective: found by reference, loaded, and held to what it promises."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from forge_async.core.errors import ConfigError, LearnerError
from forge_async.core.user_code import load_callable
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.settings import ObjectiveSettings


def load_objective(reference: str) -> Callable[[LossInputs, ObjectiveSettings], TokenLoss]:
    """Load `file.py:function` or `package.module:function`, a function of (LossInputs, ObjectiveSettings).

    It returns the loss of each token, [B, L], as a tensor or a TokenLoss. Runs the user's module.

    Raises ConfigError, in one sentence, when the function is not there, its module cannot be imported, or it does not
    take two arguments.
    """
    function = load_callable(reference, "objective.name")
    _check_signature(reference, function)
    return _checked(reference, function)


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
