"""Objectives as a user writes them."""

from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss
from forge_async.learner.settings import ObjectiveSettings

NOT_A_FUNCTION = 3


def squared(inputs: LossInputs, settings: ObjectiveSettings):
    """A proximal penalty in place of the clip."""
    log_ratio = inputs.logprobs - inputs.anchor_logprobs
    return -log_ratio.exp() * inputs.advantages + 0.5 * log_ratio.square()


def with_clip_figure(inputs, settings):
    ratio = (inputs.logprobs - inputs.anchor_logprobs).exp()
    return TokenLoss(loss=-ratio * inputs.advantages, clipped=ratio > 2, figures={"root": ratio.sqrt()})


def summed(inputs, settings):
    return inputs.logprobs.sum()


def one_argument(inputs):
    return inputs.logprobs
