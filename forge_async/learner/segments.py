"""Sums over the samples of packed rows. What a sample trains lies in one row, so each is exact without another rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_async.learner.inputs import LossInputs

if TYPE_CHECKING:
    import torch


def sums(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[B, L]: at each token the sum of `values` over the masked tokens of its sample."""
    return _totals(values * inputs.mask, inputs)[inputs.segments]


def means(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[B, L]: at each token the mean of `values` over the masked tokens of its sample; 0 for a sample without one."""
    return sums(values, inputs) / lengths(inputs)


def lengths(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: at each token the number of masked tokens of its sample, at least 1."""
    return _totals(inputs.mask, inputs).clamp(min=1)[inputs.segments]


def fresh(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: 1 at the masked tokens of samples that the trained version made whole, else 0.

    A young token of a sample that began with an older version may stand on keys and values of that version, as after a
    swap that keeps them, so that no learner could give it the same log-probability.
    """
    return inputs.mask * (sums(inputs.ages.to(inputs.mask.dtype), inputs) == 0)


def to_go(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[B, L]: at each token the sum of `values` over the masked tokens of its sample from it to the end."""
    masked = (values * inputs.mask).double()
    running = masked.cumsum(1)
    before = running - masked
    offset = _totals(before * _starts(inputs.segments), inputs)[inputs.segments]
    return (_totals(masked, inputs)[inputs.segments] - (before - offset)).to(values.dtype)


def turn_starts(inputs: LossInputs) -> torch.Tensor:
    """[B, L]: 1 at the first token of each turn, else 0. A turn is a run of masked tokens of one sample."""
    masked = inputs.mask > 0
    begins = masked & (_starts(inputs.segments) | ~masked.roll(1, dims=1))
    return begins.to(inputs.mask.dtype)


def turn_numbers(inputs: LossInputs) -> torch.Tensor:
    """[B, L] int64: number of the token's turn in the micro-batch; outside the mask, of the turn before it."""
    return (turn_starts(inputs).flatten().cumsum(0).long() - 1).clamp(min=0).view_as(inputs.segments)


def turn_sums(values: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """[B, L]: at each token the sum of `values`, which are 0 outside the mask, over its turn."""
    return values.new_zeros(turns.numel()).index_add(0, turns.flatten(), values.flatten())[turns]


def _starts(segments: torch.Tensor) -> torch.Tensor:
    """[B, L] bool: is this the first token of a sample?"""
    changed = segments != segments.roll(1, dims=1)
    changed[:, 0] = True
    return changed


def _totals(values: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[num_segments]: sum over each sample."""
    return values.new_zeros(inputs.num_segments).index_add(0, inputs.segments.flatten(), values.flatten())
