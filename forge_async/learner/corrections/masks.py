"""Corrections that leave samples out and let the objective's ratio pi/mu, with its clip, correct the others.

What is left out stays in the denominators: a batch that lost half of its samples takes half a step.
"""

from __future__ import annotations

from dataclasses import replace

from forge_async.learner import segments
from forge_async.learner.corrections.ratios import bounded_exp, log_ratio
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def geometric_mask(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Leave out samples whose geometric mean of pi/mu over tokens lies outside [low, high].

    Unlike the product, it does not grow with the length (named geometric rejection in verl's documentation of rollout
    correction, after Liu et al. 2025, "When speed kills stability").
    """
    mean = bounded_exp(segments.means(log_ratio(inputs), inputs))
    kept = (mean >= settings.low) & (mean <= settings.high)
    return replace(inputs, anchor_logprobs=inputs.behaviour_logprobs, weights=kept.to(mean.dtype))


def off_policy_mask(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Leave out samples of negative advantage whose mean log(mu/pi) over tokens is above `threshold`.

    Off-policy sequence masking (OPSM; DeepSeek-AI 2025, DeepSeek-V3.2): what the policy would not say any
    more need not be pushed away further. The sign is that of the sample's mean advantage.
    """
    divergence = -segments.means(log_ratio(inputs), inputs)
    left_out = (segments.means(inputs.advantages, inputs) < 0) & (divergence > settings.threshold)
    kept = (~left_out).to(divergence.dtype)
    return replace(inputs, anchor_logprobs=inputs.behaviour_logprobs, weights=kept)
