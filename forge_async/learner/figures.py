"""From the sums of a step to the figures that are recorded."""

from __future__ import annotations

from collections.abc import Mapping

from forge_async.learner.counts import Counts

MEANS = {
    "masked": "ratio/masked_fraction",
    "entropy": "policy/entropy",
    "reference_kl": "reference/kl",
    "teacher_kl": "teacher/kl",
}
"""Sum over tokens -> the name under which its mean a token is recorded."""


def step_figures(sums: Mapping[str, float], maxima: Mapping[str, float], counts: Counts) -> dict[str, float]:
    """Figures of a step by their names in the metrics row.

    Args:
        sums, maxima: as `LossTerms` names them, over all micro-batches and ranks.
        counts: of the whole batch.
    """
    tokens = max(counts.num_loss_tokens, 1)
    figures = {name: sums[key] / tokens for key, name in MEANS.items() if key in sums}
    figures |= {name: value / tokens for name, value in sums.items() if name.startswith("objective/")}
    if sums.get("fresh_tokens"):
        figures["mismatch/fresh_kl"] = sums["fresh_kl"] / sums["fresh_tokens"]
        figures["mismatch/fresh_logprob_diff_max"] = maxima["fresh_logprob_diff"]
    if "weight" in sums:
        figures["ratio/mean"] = sums["weight"] / tokens
        figures["ratio/max"] = maxima["weight"]
        figures["ratio/effective_fraction"] = effective_fraction(sums["weight"], sums["weight_squared"], tokens)
    if "return" in sums:
        spread = sums["return_squared"] - sums["return"] ** 2 / tokens
        figures["value/explained_fraction"] = 1 - sums["value_error"] / spread if spread > 0 else 0.0
    parts = {name: value for name, value in sums.items() if name.startswith("loss/")}
    if len(parts) > 1:
        figures |= parts
    figures["advantage/zero_fraction"] = 1 - counts.num_samples_with_advantage / max(counts.num_batch_samples, 1)
    return figures


def total_loss(sums: Mapping[str, float]) -> float:
    """The loss of a step: the sum of its components' parts."""
    return sum(value for name, value in sums.items() if name.startswith("loss/"))


def effective_fraction(weight_sum: float, squared_sum: float, num_tokens: int) -> float:
    """Effective sample size over the number of tokens: (sum of w)^2 / (n * sum of w^2) (Kong 1992); 0 without weight.

    1 when all weights are equal, 1/n when one token has all the weight.
    """
    return weight_sum * weight_sum / (num_tokens * squared_sum) if squared_sum > 0 else 0.0
