"""One forward pass of a torchtitan model over packed rows: log-probabilities, entropy, hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_async.backends import titan_cpu

# isort: split
import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from forge_async.learner.kept_terms import kept_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a pass gave, of each token's successor."""

    logprobs: torch.Tensor
    """[B, L] float32: of the targets, after temperature, over the kept sets where there are any."""
    entropy: torch.Tensor | None
    """[B, L] float32, in nats, where it was asked for."""


def forward(model: Any, columns: dict[str, torch.Tensor], temperature: float, *, entropy: str = "none") -> Forward:
    """Run the model.

    Args:
        model: torchtitan's, whole or sharded; collective when sharded.
        columns: token_ids, positions and targets, int64 [B, L]; kept_set, int64 [B, L, K], where the sampler left
            tokens out.
        temperature: logits are divided by it.
        entropy: "none", "figure" (without gradient) or "gradient".
    """
    positions = columns["positions"]
    masks = titan_cpu.document_mask(positions) if titan_cpu.ON_CPU else model.get_attention_masks(positions)
    logits = model(columns["token_ids"], attention_masks=masks, positions=positions)
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    if "kept_set" in columns:
        logprobs, found = kept_terms(logits, columns["targets"], columns["kept_set"], temperature)
        wanted = {"none": None, "figure": found.detach(), "gradient": found}
        return Forward(logprobs=logprobs, entropy=wanted[entropy])
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    logprobs = -cross_entropy(logits.flatten(0, 1), columns["targets"].flatten(), reduction="none")
    found = None
    if entropy != "none":
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            found = token_entropy(logits)
    return Forward(logprobs=logprobs.view(positions.shape), entropy=found)


def token_entropy(logits: torch.Tensor) -> torch.Tensor:
    """[B, L]: entropy in nats of the distributions whose logits are [B, L, V]."""
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
