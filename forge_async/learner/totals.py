"""What a rank adds up over the micro-batches of a step, and how it finds the sample that spoilt one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from forge_async.learner.batch import Share
from forge_async.learner.loss import LossTerms
from forge_async.learner.rows import Rows

if TYPE_CHECKING:
    import torch

Figures: TypeAlias = tuple[dict[str, float], dict[str, float]]
"""Sums and maxima of one update, over all ranks."""
NOBODY = (-1, -1)
"""No sample's loss is at fault."""


@dataclass(slots=True)
class StepTotals:
    """Sums and maxima by name, in float64 on the host."""

    sums: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("row_tokens", "sample_tokens", "clipped", "mismatch_kl"), 0.0)
    )
    maxima: dict[str, float] = field(default_factory=lambda: {"logprob_diff": 0.0})

    def add(self, terms: LossTerms, rows: Rows) -> bool:
        """Add one micro-batch, whose figures come to the host in one copy. Returns whether its loss is finite."""
        figures = (*terms.sums.values(), *terms.maxima.values())
        values = _stack(figures).tolist()
        for name, value in zip(terms.sums, values[: len(terms.sums)], strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in zip(terms.maxima, values[len(terms.sums) :], strict=True):
            self.maxima[name] = max(self.maxima.get(name, 0.0), value)
        self.sums["row_tokens"] += rows.token_ids.size
        self.sums["sample_tokens"] += rows.num_sample_tokens
        return all(math.isfinite(self.sums[name]) for name in terms.sums if name.startswith("loss/"))

    def sum_values(self) -> torch.Tensor:
        """float64 [number of sums], in the order of `sums`."""
        import torch

        return torch.tensor(list(self.sums.values()), dtype=torch.float64)


def merge_updates(updates: list[Figures], num_parts: int = 1) -> Figures:
    """Sums and maxima of a step of several updates: means over its passes through the batch.

    The mismatch is that of the first pass, which begins with the step.

    Args:
        updates: whole passes.
        num_parts: mini-batches, and so updates, of a pass.
    """
    first = _merged(updates[:num_parts], num_parts)
    sums, maxima = _merged(updates, num_parts)
    at_start = ("mismatch_kl", "fresh_kl", "fresh_tokens", "logprob_diff", "fresh_logprob_diff")
    sums |= {name: first[0][name] for name in at_start if name in sums}
    return sums, maxima | {name: first[1][name] for name in at_start if name in maxima}


def _merged(updates: list[Figures], num_parts: int) -> Figures:
    passes = len(updates) / num_parts
    # A part of the loss has its mini-batch's denominator already; other sums still wait for the batch's.
    divisors = {name: len(updates) if name.startswith("loss/") else passes for name in updates[0][0]}
    sums = {name: sum(each[name] for each, _ in updates) / divisors[name] for name in divisors}
    return sums, {name: max(each[name] for _, each in updates) for name in updates[0][1]}


def _stack(values: tuple[torch.Tensor, ...]) -> torch.Tensor:
    import torch

    return torch.stack([value.float() for value in values]).cpu()


def first_bad_sample(terms: LossTerms, rows: Rows, share: Share) -> tuple[int, int]:
    """(group's admission index, number in the group) of the first sample whose loss is not finite, or NOBODY."""
    bad = ~terms.token_losses.isfinite().cpu().numpy()
    segments = rows.segments[bad]
    known = segments[segments < len(rows.sample_indices)]
    if not len(known) or not share.origins:
        return NOBODY
    return share.origins[rows.sample_indices[int(known.min())]]


def not_finite(
    step: tuple[int, int], loss: float, grad_norm: float, group_indices: tuple[int, ...], sample: tuple[int, int]
) -> str:
    """The sentence that ends a run whose step is not finite.

    Args:
        step: the learner's step, and the update on its batch, from 0.
        sample: (group's admission index, number in the group) of a sample to blame, or NOBODY.
    """
    update = f", update {step[1]} on its batch" if step[1] else ""
    whose = f" over groups {group_indices[0]}..{group_indices[-1]}" if group_indices else ""
    if sample != NOBODY:
        blame = f"the loss of sample {sample[1]} of group {sample[0]} is the first that is not finite"
    else:
        blame = "the loss of each sample is finite"
    return (
        f"Step {step[0]}{update}: loss={loss} and gradient norm={grad_norm}{whose} are not finite ({blame}); "
        "the weights were left as they were. Lower optimizer.lr, or look at these samples in rollouts.jsonl.zst."
    )
