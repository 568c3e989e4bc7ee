"""On-policy distillation."""

from __future__ import annotations

from forge_async.core.errors import LearnerError
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives.terms import TokenLoss, log_ratio
from forge_async.learner.settings import ObjectiveSettings


def distillation(inputs: LossInputs, settings: ObjectiveSettings) -> TokenLoss:
    """-r * sg(log teacher - log pi): the reverse divergence of each token from a teacher, as a policy gradient.

    Agarwal et al. 2024 (GKD, reverse KL); Lu and Thinking Machines 2025 ("On-policy distillation"), where the
    sampled token's log-ratio is the advantage of that token and no later one.
    """
    if inputs.teacher_logprobs is None:
        raise LearnerError("Distillation needs the teacher's log-probabilities, and the learner gave none.")
    advantage = inputs.teacher_logprobs - inputs.logprobs.detach()
    return TokenLoss(loss=-log_ratio(inputs).exp() * advantage)
