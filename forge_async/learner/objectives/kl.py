"""The divergence from a reference, as a loss or as a part of the reward."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forge_async.core.errors import LearnerError
from forge_async.learner import segments
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, log_ratio
from forge_async.learner.settings import ObjectiveSettings

if TYPE_CHECKING:
    import torch


def kl_estimate(logprobs: torch.Tensor, reference_logprobs: torch.Tensor, kind: str) -> torch.Tensor:
    """[B, L]: an estimate of KL(pi || reference) from one token sampled by pi (Schulman 2020, "Approximating KL").

    With d = log pi - log reference: k1 = d (unbiased, noisy), k2 = d*d/2 (biased, its gradient is that of the
    divergence), k3 = exp(-d) - 1 + d (unbiased, never negative; GRPO, Shao et al. 2024, eq. 4).
    """
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    return (-difference).expm1() + difference  # exp(-d) - 1 would round a small divergence to 0, or below it


def kl_loss(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """The estimate of each token, with gradient.

    `k3_is` is the ratio pi/anchor times k3: its gradient is on average that of the divergence, which k3's alone is not,
    and it makes up for age (DeepSeek-AI 2025, DeepSeek-V3.2, "unbiased KL estimate"). The gradient of plain k1 is 0 on
    average and teaches nothing, so `k1` is refused as a loss.
    """
    kind = settings.kl_kind
    estimate = kl_estimate(inputs.logprobs, _reference(inputs), kind.removesuffix("_is"))
    return TokenLoss(loss=estimate * log_ratio(inputs).exp() if kind.endswith("_is") else estimate)


def with_kl_in_reward(inputs: LossInputs, settings: ObjectiveSettings) -> LossInputs:
    """Advantages less kl_weight times the estimates, at the step's start, from each token to the end of its sample.

    The penalty as a reward of each token, undiscounted (Ouyang et al. 2022, InstructGPT, eq. 2; Hu et al. 2025,
    REINFORCE++). It is subtracted after the advantages were normalised, and has no gradient of its own.
    """
    start = inputs.logprobs.detach() if inputs.start_logprobs is None else inputs.start_logprobs
    estimate = kl_estimate(start, _reference(inputs), settings.kl_kind)
    penalty = settings.kl_weight * segments.to_go(estimate, inputs)
    return replace(inputs, advantages=(inputs.advantages - penalty) * inputs.mask)


def _reference(inputs: LossInputs) -> torch.Tensor:
    if inputs.reference_logprobs is None:
        raise LearnerError("The divergence needs the reference's log-probabilities, and the learner gave none.")
    return inputs.reference_logprobs
