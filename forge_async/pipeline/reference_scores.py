"""What frozen models say of a worker's finished groups, where they are a service: scored before they are handed over.

It is a part of scoring, the stage between generation and training, and overlaps with both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from forge_async.core.records import Group, Samples, bounds


class Reference(Protocol):
    """The reference service, from the side of a rollout worker."""

    async def score(self, samples: Samples) -> Mapping[str, np.ndarray]:
        """By field of Samples float32 [T]: log-probabilities of the tokens that are trained on. Has a deadline."""
        ...


async def with_reference_scores(groups: Sequence[Group], reference: Reference) -> list[Group]:
    """The groups with the fields that the service gives, asked for all of them together."""
    if not groups:
        return []
    asked = Samples.concat([_question(group.samples) for group in groups])
    found = await reference.score(asked)
    edges = bounds(np.array([group.samples.num_tokens for group in groups]))
    return [
        dataclasses.replace(
            group,
            samples=dataclasses.replace(group.samples, **{name: column[start:stop] for name, column in found.items()}),
        )
        for group, start, stop in zip(groups, edges[:-1], edges[1:], strict=True)
    ]


def _question(samples: Samples) -> Samples:
    """Without what the service does not look at: another model chooses its experts itself."""
    return dataclasses.replace(samples, routed_experts=None)
