"""Log-probabilities and entropy over kept sets: what a sampler with top-p or top-k really drew from (Law 8)."""

from __future__ import annotations

import torch


def kept_terms(
    logits: torch.Tensor, targets: torch.Tensor, kept_set: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Renormalise over the kept sets alone.

    Args:
        logits: [..., V], of any floating dtype, before temperature.
        targets: int64 [...], each one of its kept set.
        kept_set: int64 [..., K], -1 padded. Where it has no id nothing was sampled: the target is all there is.
        temperature: logits are divided by it.

    Returns float32 [...] each: log-probabilities of the targets, and the entropies in nats.
    """
    only_target = torch.cat([targets[..., None], kept_set.new_full((*targets.shape, kept_set.shape[-1] - 1), -1)], -1)
    kept_set = torch.where(kept_set[..., :1] < 0, only_target, kept_set)
    scaled = logits.gather(-1, torch.cat([targets[..., None], kept_set.clamp(min=0)], -1)).float() / temperature
    # A finite stand-in for -inf, whose product with a probability of 0 would be no number.
    kept = scaled[..., 1:].masked_fill(kept_set < 0, torch.finfo(torch.float32).min)
    logprobs = kept.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs.masked_fill(kept_set < 0, 0.0)).sum(-1)
    return scaled[..., 0] - kept.logsumexp(-1), entropy
