"""From hidden states to log-probabilities and entropies, a chunk of tokens at a time.

The logits of all tokens, [tokens, vocabulary], are the largest array of a step: 32,768 tokens and a vocabulary of
150,000 make 20 GB, and their gradient as much again. Here each chunk's logits are dropped once its figures are taken,
and made anew in the backward pass: memory is bounded by chunk times vocabulary, at the price of a second projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_async.learner.kept_terms import kept_terms

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is asked of the distributions over the vocabulary."""

    temperature: float = 1.0
    """Logits are divided by it."""
    entropy: str = "none"
    """"none", "figure" (without gradient) or "gradient"."""
    chunk_tokens: int
    """Tokens whose logits are held at a time, at least 1."""


def token_scores(
    project: Callable[[Any], Any],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    wanted: Wanted,
    kept_set: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the targets, and entropies in nats where they are wanted; both [B, L] float32.

    Args:
        project: hidden states [..., D] to logits [..., V]; called once more for each chunk in the backward pass.
        hidden: [B, L, D].
        targets: int64 [B, L].
        wanted: the rest of the question.
        kept_set: int64 [B, L, K], the tokens that the sampler left in, over which to renormalise; None: all tokens.
    """
    if targets.numel() <= wanted.chunk_tokens:
        return _scores(project, hidden, targets, wanted, kept_set)
    from torch.utils.checkpoint import checkpoint

    states = whole(hidden).flatten(0, 1).split(wanted.chunk_tokens)
    parts = targets.flatten().split(wanted.chunk_tokens)
    kept = [None] * len(parts) if kept_set is None else kept_set.flatten(0, 1).split(wanted.chunk_tokens)
    found = [
        checkpoint(
            _scores,
            project,
            chunk[None],
            part[None],
            wanted,
            None if of_part is None else of_part[None],
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for chunk, part, of_part in zip(states, parts, kept, strict=True)
    ]
    logprobs, entropies = zip(*found, strict=True)
    return _joined(logprobs, targets), None if entropies[0] is None else _joined(entropies, targets)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with all its parts on this rank."""
    full_tensor = getattr(tensor, "full_tensor", None)
    return tensor if full_tensor is None else full_tensor()


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """[B, L]: entropy in nats of the distributions whose logits are [B, L, V]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)


def _scores(
    project: Callable[[Any], Any],
    hidden: torch.Tensor,
    targets: torch.Tensor,
    wanted: Wanted,
    kept_set: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch
    from torch.nn.functional import cross_entropy

    from forge_async.learner.split_vocabulary import is_split, split_scores

    logits = project(hidden)
    if kept_set is None and is_split(logits):
        return split_scores(logits, targets, wanted.temperature, wanted.entropy)
    logits = whole(logits)
    if kept_set is not None:
        logprobs, entropy = kept_terms(logits, targets, kept_set, wanted.temperature)
        return logprobs, {"none": None, "figure": entropy.detach(), "gradient": entropy}[wanted.entropy]
    logits = logits.float()
    if wanted.temperature != 1.0:
        logits = logits / wanted.temperature
    logprobs = -cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    if wanted.entropy == "none":
        return logprobs, None
    with torch.set_grad_enabled(wanted.entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, token_entropy(logits)


def _joined(parts: tuple[torch.Tensor, ...], like: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([part.flatten() for part in parts]).view(like.shape).clone()  # FSDP wants no view
