"""Weights of single tokens. With rho = start/mu of a token, start being the policy at the step's start."""

from __future__ import annotations

from forge_async.learner.corrections.ratios import bounded_exp, log_ratio, weighted
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def token_truncated(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight min(rho, high): truncated importance sampling (TIS; Ionides 2008; for RL of language models Yao et al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training")."""
    return weighted(inputs, bounded_exp(log_ratio(inputs)).clamp(max=settings.high))


def token_masked(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight rho where rho <= high, else 0: masked importance sampling (MIS; Liu et al. 2025, "When speed kills
    stability")."""
    rho = bounded_exp(log_ratio(inputs))
    return weighted(inputs, rho * (rho <= settings.high))


def icepop(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight rho where low <= rho <= high, else 0: IcePop (Ling team of Ant Group 2025, "Small leak can
    sink a great ship")."""
    rho = bounded_exp(log_ratio(inputs))
    return weighted(inputs, rho * ((rho >= settings.low) & (rho <= settings.high)))
