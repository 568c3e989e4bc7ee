"""Demonstrations as trainable samples: what a policy should have answered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns


def demonstration_samples(prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]) -> Samples:
    """Join prompts with their completions; the completions' tokens are trained on.

    Args:
        prompts: int32 [T] each.
        completions: int32 [C] each, the stop token included.
    """
    lengths = np.array([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)], dtype=np.int32)
    mask = np.concatenate([np.arange(len(p) + len(c)) >= len(p) for p, c in zip(prompts, completions, strict=True)])
    total = int(lengths.sum())
    return Samples(
        lengths=lengths,
        token_ids=np.concatenate([part for pair in zip(prompts, completions, strict=True) for part in pair]).astype(
            np.int32
        ),
        loss_mask=mask,
        logprobs=np.zeros(total, np.float32),
        advantages=mask.astype(np.float32),
        versions=VersionRuns.of([(total, NOT_SAMPLED, 0)]),
    )
