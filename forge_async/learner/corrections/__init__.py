"""Corrections for age and for differences between engine and learner; independent of the objective.

The tokens were made by the behaviour policy mu (the engine, at some age); the gradient is of the current policy pi. A
correction chooses the anchor that the objective's ratio pi/anchor is taken against, and a weight for each token's loss,
which has no gradient. Every formula is in `docs/objectives.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

from forge_async.core.errors import ConfigError
from forge_async.learner.corrections.aipo import aipo
from forge_async.learner.corrections.anchors import none, token_is
from forge_async.learner.corrections.decoupled import decoupled, decoupled_approx
from forge_async.learner.corrections.masks import geometric_mask, off_policy_mask
from forge_async.learner.corrections.sequence import sequence_masked, sequence_truncated
from forge_async.learner.corrections.token import icepop, token_masked, token_truncated
from forge_async.learner.corrections.vtrace import vtrace
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings

Correction: TypeAlias = Callable[[LossInputs, CorrectionSettings], LossInputs]
"""Returns its inputs with `anchor_logprobs` and `weights` set."""

_FUNCTIONS: tuple[Correction, ...] = (
    token_is,
    none,
    token_truncated,
    token_masked,
    icepop,
    sequence_truncated,
    sequence_masked,
    geometric_mask,
    off_policy_mask,
    aipo,
    decoupled,
    decoupled_approx,
    vtrace,
)
BY_NAME: Mapping[str, Correction] = {function.__name__: function for function in _FUNCTIONS}
"""`async.correction` to its function."""
WITHOUT_START = frozenset({"token_is", "aipo", "decoupled_approx"})
"""Those that do not look at the policy of the step's start."""


def correction(name: str, settings: CorrectionSettings) -> Callable[[LossInputs], LossInputs]:
    """The correction of that name, with weights that fall with age where `correction.age_decay` is below 1.

    Raises ConfigError for a name that is none.
    """
    if name not in BY_NAME:
        raise ConfigError(f"async.correction={name} is not one of {', '.join(BY_NAME)}.")
    function = BY_NAME[name]

    def corrected(inputs: LossInputs) -> LossInputs:
        found = function(inputs, settings)
        return found if settings.age_decay == 1.0 else _decayed(found, settings.age_decay)

    return corrected


def _decayed(inputs: LossInputs, age_decay: float) -> LossInputs:
    decay = age_decay ** inputs.ages.to(inputs.logprobs.dtype)
    return replace(inputs, weights=decay if inputs.weights is None else inputs.weights * decay)
