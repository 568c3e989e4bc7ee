"""V-trace over the turns of a sample."""

from __future__ import annotations

import math

from forge_async.learner import segments
from forge_async.learner.corrections.ratios import bounded_exp, log_ratio, weighted
from forge_async.learner.inputs import LossInputs
from forge_async.learner.settings import CorrectionSettings


def vtrace(inputs: LossInputs, settings: CorrectionSettings) -> LossInputs:
    """Weight of turn k of K: rho_k * c_(k+1) * ... * c_(K-1) * rho_K, and rho_K for the last.

    V-trace (Espeholt et al. 2018, IMPALA, eq. 1 and section 4.2) with turns as the actions, the sample's advantage as
    the reward of its last turn, gamma = lambda = 1 and no value function: the policy-gradient weight is
    rho_k * v_(k+1), and v_(k+1) unrolls to the product of the truncated ratios that follow. With r_k the product of
    pi/mu over the turn's tokens, rho = min(r, high) and c = min(r, 1). For one turn it is `sequence_truncated`.
    """
    starts = segments.turn_starts(inputs)
    turns = segments.turn_numbers(inputs)
    turn_ratio = segments.turn_sums(log_ratio(inputs), turns)
    log_rho, log_c = turn_ratio.clamp(max=math.log(settings.high)), turn_ratio.clamp(max=0.0)
    is_last = segments.to_go(starts, inputs) == starts
    link = log_rho.where(is_last, log_c) * starts
    later = segments.to_go(link, inputs) - link
    log_weight = segments.turn_sums((log_rho + later) * starts, turns)
    return weighted(inputs, bounded_exp(log_weight * inputs.mask))
