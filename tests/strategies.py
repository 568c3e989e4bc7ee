"""Builders of small records, and Hypothesis strategies over the dials."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from forge_async.core.records import Group, PromptId, Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.replay.settings import AsyncSettings


def make_samples(sample_steps: Sequence[Sequence[int]], *, prompt_tokens: int = 1, incarnation: int = 0) -> Samples:
    """Samples of `prompt_tokens` prompt tokens and one sampled token for each version step given."""
    lengths = np.asarray([prompt_tokens + len(steps) for steps in sample_steps], dtype=np.int32)
    runs: list[tuple[int, int, int]] = []
    for steps in sample_steps:
        runs.append((prompt_tokens, NOT_SAMPLED, 0))
        runs.extend((1, step, incarnation) for step in steps)
    total = int(lengths.sum())
    versions = VersionRuns.of(runs)
    mask = versions.per_token_steps() != NOT_SAMPLED
    return Samples(
        lengths=lengths,
        token_ids=np.arange(total, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        advantages=np.where(mask, 1.0, 0.0).astype(np.float32),
        versions=versions,
    )


def with_sets(sample_steps: Sequence[Sequence[int]], width: int) -> Samples:
    """`make_samples`, whose token t was kept with the ids 10 t, 10 t + 1 ..."""
    samples = make_samples(sample_steps)
    ids = 10 * np.arange(samples.num_tokens)[:, None] + np.arange(width)
    return dataclasses.replace(samples, kept_set=np.where(samples.loss_mask[:, None], ids, -1).astype(np.int32))


def make_group(
    index: int,
    prompt_id: PromptId,
    sample_steps: Sequence[Sequence[int]],
    *,
    prompt_tokens: int = 1,
    incarnation: int = 0,
) -> Group:
    """A scored group of `make_samples`."""
    samples = make_samples(sample_steps, prompt_tokens=prompt_tokens, incarnation=incarnation)
    return Group(index=index, prompt_id=prompt_id, samples=samples, rewards=np.zeros(len(samples), dtype=np.float32))


@st.composite
def dials(
    draw: st.DrawFn,
    *,
    max_staleness: int = 4,
    groups_per_step: int = 4,
    on_stale: Sequence[str] = ("wait", "drop", "raise"),
) -> tuple[AsyncSettings, int]:
    """Legal combinations of `bounded` dials, and P."""
    age = draw(st.integers(0, max_staleness))
    every = draw(st.integers(1, age + 1))
    num_groups = draw(st.integers(1, groups_per_step))
    num_fresh = draw(st.integers(0, num_groups - 1)) if age > 0 and every == 1 and draw(st.booleans()) else 0
    window = draw(st.integers(1, (age - every + 1) * (num_groups - num_fresh) + 1))
    settings = AsyncSettings(
        max_staleness="auto" if age > 0 and draw(st.booleans()) else age,
        max_staleness_cap=max(age, 1),
        fresh_fraction=num_fresh / num_groups,
        window=window,
        publish_every=every,
        order=draw(
            st.sampled_from(("fifo", "windowed_fifo", "freshest") if window == 1 else ("windowed_fifo", "freshest"))
        ),
        max_queue_tokens=draw(st.sampled_from((1, 40, 10**6))),
        on_stale=draw(st.sampled_from(tuple(on_stale))),
        max_attempts=draw(st.sampled_from((1, 3, 100))),
        max_filtered_batches=10**6,
    )
    return settings, num_groups
