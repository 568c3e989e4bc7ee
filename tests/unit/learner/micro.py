"""Micro-batches by hand, for the tests of objectives and corrections."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from forge_async.learner.batch import lay_out_samples
from forge_async.learner.counts import Counts
from forge_async.learner.inputs import LossInputs
from forge_async.learner.layout import Layout, lay_out
from forge_async.learner.rows import build_micro_batches


def one_row(ratios, advantages, *, mask=None, segments=None, ages=None, behaviour=0.5, **optional):
    """One row in float64: tokens that the sampler made with probability `behaviour` and the current policy with
    ratio times that. `segments` numbers the samples; all tokens are one sample when None."""
    count = len(ratios)
    sampler = torch.full((1, count), math.log(behaviour), dtype=torch.float64)
    current = (sampler + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()
    segments = torch.tensor([segments or [0] * count])
    return LossInputs(
        logprobs=current,
        behaviour_logprobs=sampler,
        anchor_logprobs=sampler,
        advantages=torch.tensor([advantages], dtype=torch.float64),
        mask=torch.tensor([mask or [1.0] * count], dtype=torch.float64),
        segments=segments,
        num_segments=int(segments.max()) + 1,
        ages=torch.tensor([ages or [0] * count]),
        **{name: torch.tensor([value], dtype=torch.float64) for name, value in optional.items()},
    )


def laid_out(samples, **layout):
    """The micro-batches of one rank that has these samples; `layout`: fields of Layout."""
    if samples is None:
        return build_micro_batches(None, lay_out([], Layout(**layout))[0])
    ranks, skipped = lay_out_samples(samples, Layout(**layout), 1)
    return build_micro_batches(samples, ranks[0], skipped)


def counts_of(inputs, num_batch_samples=None):
    """Counts of a batch that is this one micro-batch."""
    trained = inputs.advantages[inputs.mask > 0]
    samples = len(set(inputs.segments[inputs.mask > 0].tolist()))
    return Counts(
        num_loss_tokens=int(inputs.mask.sum()),
        num_samples=samples,
        num_batch_samples=num_batch_samples or samples,
        num_samples_with_advantage=samples,
        advantage_mean=float(trained.mean()),
        advantage_std=float(trained.std(correction=0)),
    )


def random_inputs(seed=0, num_rows=3, width=12, spread=0.4, dtype=torch.float64, one_sample_a_row=False):
    """Rows of three samples or one, some tokens masked, ratios around 1, ages 0 to 3, everything optional given."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, width)

    def normal():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(shape, generator=generator) < 0.7).to(dtype)
    behaviour = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.2
    per_row = 1 if one_sample_a_row else 3
    number = torch.arange(width) * per_row // width
    advantages = normal()[:, :1].expand(shape) if one_sample_a_row else normal()
    return LossInputs(
        logprobs=(behaviour + spread * normal()).to(dtype).requires_grad_(),
        behaviour_logprobs=behaviour.to(dtype),
        anchor_logprobs=behaviour.to(dtype),
        advantages=(advantages * mask).to(dtype),
        mask=mask,
        segments=number + per_row * torch.arange(num_rows)[:, None],
        num_segments=per_row * num_rows,
        ages=torch.randint(0, 4, shape, generator=generator) * (mask > 0),
        reference_logprobs=(behaviour + spread * normal()).to(dtype),
        teacher_logprobs=(behaviour + spread * normal()).to(dtype),
        entropy=normal().abs().to(dtype).requires_grad_(),
        values=normal().to(dtype).requires_grad_(),
        old_values=normal().to(dtype),
        returns=normal().to(dtype),
    )


def at(inputs, logprobs):
    """The same with other current log-probabilities."""
    return replace(inputs, logprobs=logprobs)
