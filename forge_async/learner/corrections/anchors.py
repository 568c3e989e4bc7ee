"""Corrections that choose an anchor and weigh nothing."""

from __future__ import annotations

from dataclasses import replace

from forge_async.learner.corrections.ratios import start_logprobs
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def token_is(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Anchor = behaviour policy: the objective's own ratio pi/mu corrects, and its clip bounds it.

    PPO with the sampler's probabilities as the old ones (Schulman et al. 2017, eq. 6); the ratio makes up for age and
    for differences between engine and learner at once.
    """
    return replace(inputs, anchor_logprobs=inputs.behaviour_logprobs, weights=None)


def none(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Anchor = the policy at the step's start, as if it had sampled: the ratio of the first update is 1."""
    return replace(inputs, anchor_logprobs=start_logprobs(inputs), weights=None)
