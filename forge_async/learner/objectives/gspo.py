"""GSPO."""

from __future__ import annotations

from forge_async.learner import segments
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, clipped_surrogate, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def gspo(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """Group sequence policy optimization (Zheng et al. 2025, eq. 5).

    The ratio is the sample's: s = exp(mean over its tokens of log(pi/anchor)), the same at each of them, and clipped as
    a whole; `objective.denominator=sequence_means` makes the loss the mean over samples of -min(s*A, clip(s)*A).
    """
    ratio = segments.means(log_ratio(inputs), inputs).exp()
    return clipped_surrogate(ratio, inputs, settings)
