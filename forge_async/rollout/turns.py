"""The turns of samples: where they lie, and advantages of turns on their tokens.

A turn is a run of tokens that the policy made; between two turns lie tokens of the environment, at least one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from forge_async.core.errors import ForgeError
from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED


def turn_spans(samples: Samples) -> list[np.ndarray]:
    """Of each sample int64 [turns, 2]: start and end of its turns on the flat axis of tokens."""
    sampled = samples.versions.per_token_steps() != NOT_SAMPLED
    before, after = np.append(False, sampled[:-1]), np.append(sampled[1:], False)
    edges = samples.bounds()
    before[edges[:-1]], after[edges[1:] - 1] = False, False
    spans = np.stack([np.flatnonzero(sampled & ~before), np.flatnonzero(sampled & ~after) + 1], axis=1)
    return np.split(spans, np.searchsorted(spans[:, 0], edges[1:-1]))


def with_turn_advantages(samples: Samples, advantages: Sequence[np.ndarray]) -> Samples:
    """The samples, each token that is trained on with the advantage of its turn.

    Args:
        samples: one for each rollout.
        advantages: [turns] of each, as `reward.turn_advantages` gives them.

    Raises ForgeError where a sample has another number of turns.
    """
    spans = turn_spans(samples)
    for number, (found, given) in enumerate(zip(spans, advantages, strict=True)):
        if len(found) != len(given):
            raise ForgeError(f"Sample {number} has {len(found)} turns, and {len(given)} advantages were given for it.")
    per_token = np.zeros(samples.num_tokens, np.float32)
    for (start, stop), advantage in zip(np.concatenate(spans), np.concatenate(advantages), strict=True):
        per_token[start:stop] = advantage
    return dataclasses.replace(samples, advantages=per_token * samples.loss_mask)
