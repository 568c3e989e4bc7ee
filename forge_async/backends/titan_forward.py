"""One forward pass of a torchtitan model over packed rows: log-probabilities and entropy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forge_async.backends import titan_moe
from forge_async.backends.titan_attention import attention_masks

# isort: split
import torch

from forge_async.learner.token_scores import Wanted, token_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What a pass gave, of each token's successor."""

    logprobs: torch.Tensor
    """[B, L] float32: of the targets, after temperature, over the kept sets where there are any."""
    entropy: torch.Tensor | None
    """[B, L] float32, in nats, where it was asked for."""


def forward(model: Any, columns: dict[str, torch.Tensor], wanted: Wanted) -> Forward:
    """Run the model.

    Args:
        model: torchtitan's, whole or sharded; collective when sharded.
        columns: token_ids, positions and targets, int64 [B, L]; mask, float32 [B, L]; kept_set, int64 [B, L, K], where
            the sampler left tokens out; routed_experts, integer [B, L, layers with experts, K], where they are forced.
        wanted: temperature, whether entropy is wanted, and how many tokens' logits may be held at a time.
    """
    positions, targets, kept_set = columns["positions"], columns["targets"], columns.get("kept_set")
    titan_moe.set_routing(model, columns.get("routed_experts"), columns["mask"] > 0)
    masks = attention_masks(model, positions)
    with _head_gives(model.lm_head, lambda project, hidden: token_scores(project, hidden, targets, wanted, kept_set)):
        logprobs, entropy = model(columns["token_ids"], attention_masks=masks, positions=positions)
    return Forward(logprobs=logprobs, entropy=entropy)


@contextmanager
def _head_gives(head: Any, give: Callable[[Callable[[Any], Any], Any], Any]) -> Iterator[None]:
    """Have the model's head give `give(projection, hidden states)` in place of logits.

    Inside the head's own call, so that FSDP gathers its weight once for all chunks, forward and backward.
    """
    project = head.forward
    head.forward = lambda hidden: give(project, hidden)
    try:
        yield
    finally:
        head.forward = project
