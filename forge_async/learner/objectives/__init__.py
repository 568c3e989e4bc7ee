"""Objectives by name: each a function of a micro-batch that gives the loss of every token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from forge_async.core.errors import ConfigError
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.cispo import cispo
from forge_async.learner.objectives.cross_entropy import cross_entropy
from forge_async.learner.objectives.dapo import dapo
from forge_async.learner.objectives.dr_grpo import dr_grpo
from forge_async.learner.objectives.grpo import grpo
from forge_async.learner.objectives.gspo import gspo
from forge_async.learner.objectives.ppo import ppo
from forge_async.learner.objectives.reinforce_pp import reinforce_pp
from forge_async.learner.objectives.rloo import rloo
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.objectives.user import load_objective
from forge_async.learner.settings import OBJECTIVES, ObjectiveSettings

Objective: TypeAlias = Callable[[LossInputs, ObjectiveSettings], TokenLoss]

BY_NAME: Mapping[str, Objective] = {
    function.__name__: function for function in (grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp, ppo)
}
"""`objective.name` to its function."""

__all__ = ["BY_NAME", "Objective", "TokenLoss", "cross_entropy", "objective"]


def objective(name: str) -> Objective:
    """The objective of that name, or the user's own that it refers to; ConfigError when there is none."""
    if ":" in name:
        return load_objective(name)
    if name not in BY_NAME:
        raise ConfigError(
            f"objective.name={name} is not one of {', '.join(OBJECTIVES)}, nor file.py:function or "
            "package.module:function."
        )
    return BY_NAME[name]
