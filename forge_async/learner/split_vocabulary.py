"""Log-probabilities and entropies where each rank of a group holds the logits of a part of the vocabulary.

Three numbers a token travel between the ranks in place of the logits: the largest, the sum of exponentials, and the
target's own (Shoeybi et al. 2019, Megatron-LM, section 3); a fourth for the entropy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torch.distributed as dist


def is_split(logits: Any) -> bool:
    """Whether these are logits [B, L, V] of which each rank of a group holds a part of the vocabulary."""
    placements = getattr(logits, "placements", ())
    return len(placements) == 1 and placements[0].is_shard(logits.dim() - 1)


def split_scores(
    logits: Any, targets: torch.Tensor, temperature: float, entropy: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the targets, and entropies in nats where they are wanted; both [B, L] float32.

    Args:
        logits: [B, L, V], a DTensor that `is_split`.
        targets: int64 [B, L], the same on all ranks.
        temperature: logits are divided by it.
        entropy: as `Wanted.entropy`.
    """
    group, first = logits.device_mesh.get_group(), _first_token(logits)
    local = logits.to_local().float() / temperature  # [B, L, V of this rank]
    shifted = local - _largest(local, group)[..., None]
    exponentials = shifted.exp()
    total = _Sum.apply(exponentials.sum(-1), group)
    logprobs = _Sum.apply(_of_targets(shifted, targets - first), group) - total.log()
    if entropy == "none":
        return logprobs, None
    with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
        return logprobs, total.log() - _Sum.apply((exponentials * shifted).sum(-1), group) / total


def _first_token(logits: Any) -> int:
    """Of this rank's part of the vocabulary."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
    return offsets[-1]


def _largest(local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[B, L]: the largest logit of each token over all ranks."""
    import torch.distributed as dist

    found = local.detach().new_full(local.shape[:-1], -torch.inf)
    if local.shape[-1]:
        found = local.detach().amax(-1)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return found


def _of_targets(shifted: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, L]: the entries at these places of the last dimension, 0 for places of other ranks."""
    num = shifted.shape[-1]
    if not num:
        return shifted.sum(-1)
    picked = shifted.gather(-1, places.clamp(0, num - 1)[..., None]).squeeze(-1)
    return torch.where((places >= 0) & (places < num), picked, 0.0)


class _Sum(torch.autograd.Function):
    """The sum over the ranks. Each goes on with it in the same way, so the gradient passes to each as it is."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:  # noqa: ARG004
        import torch.distributed as dist

        whole = part.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        return gradients[0], None
