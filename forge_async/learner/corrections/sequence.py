"""Weights of whole samples. With R = product of start/mu over its tokens, start as in `token`."""

from __future__ import annotations

from forge_async.learner import segments
from forge_async.learner.corrections.ratios import bounded_exp, log_ratio, weighted
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def sequence_truncated(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight min(R, high) of every token: the unbiased ratio of a sample, truncated (Liu et al. 2025, "When speed kills
    stability")."""
    return weighted(inputs, bounded_exp(segments.sums(log_ratio(inputs), inputs)).clamp(max=settings.high))


def sequence_masked(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight R of every token where R <= high, else 0 for the whole sample (Liu et al. 2025, as above)."""
    ratio = bounded_exp(segments.sums(log_ratio(inputs), inputs))
    return weighted(inputs, ratio * (ratio <= settings.high))
