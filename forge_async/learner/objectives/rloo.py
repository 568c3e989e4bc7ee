"""RLOO."""

from __future__ import annotations

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def rloo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, "Back to basics"; Kool et al. 2019).

    -r*A for each token, unclipped; its gradient is -r*A*grad log pi, and with r = 1 that of REINFORCE. Set with the
    name: `advantage.baseline=leave_one_out`, `advantage.scale=none`, `objective.denominator=sequences`.
    """
    return TokenLoss(loss=-log_ratio(inputs).exp() * inputs.advantages)
