"""Beginnings that samples have in common: computed once for those that lie side by side in a row.

The samples of a group begin with the same prompt. What a causal model makes of a token depends on it and on those
before it alone, so one pass over the prompt serves all of them, forward and backward (Liu et al., Prefix Grouper, arXiv
2506.05433). The prompt's last token is not shared: there each sample goes on to a token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Which samples begin alike, and how far."""

    families: Sequence[int]
    """Of each sample the first one that begins as it does; its own number where none does before it."""
    lengths: Sequence[int]
    """Tokens of each sample's beginning, the same in a family; less than the sample has."""

    @classmethod
    def none(cls, num_samples: int) -> Prefixes:
        """Nobody shares anything."""
        return cls(families=range(num_samples), lengths=[0] * num_samples)

    @property
    def any_shared(self) -> bool:
        """Whether two samples begin alike."""
        return any(family != index and self.lengths[index] for index, family in enumerate(self.families))

    def skipped(self, row: Sequence[int]) -> list[int]:
        """Of each sample of a row how many of its first tokens the row holds already: those of its family's first."""
        before = [-1, *(self.families[index] for index in row[:-1])]
        return [
            self.lengths[index] if self.families[index] == last else 0 for index, last in zip(row, before, strict=True)
        ]


def shared_prefixes(samples: Samples) -> Prefixes:
    """All that comes before the last token of each sample's prompt, where others have the same.

    Where experts are forced on tokens, those of the beginning must be the same too.
    """
    edges = samples.bounds()
    trained = np.flatnonzero(samples.loss_mask)
    first = np.append(trained, samples.num_tokens)[np.searchsorted(trained, edges[:-1])]
    # One token is left for each sample; one without a token to train on shares nothing.
    lengths = np.where(first < edges[1:], first - edges[:-1] - 1, 0).clip(min=0).tolist()
    starts, routed = edges[:-1].tolist(), samples.routed_experts
    firsts: dict[bytes, list[int]] = {}
    """Of each beginning the first samples that have it: one, or one for each way in which its tokens were routed."""

    def routed_alike(one: int, other: int) -> bool:
        here, there = (slice(starts[index], starts[index] + lengths[index]) for index in (one, other))
        return routed is None or np.array_equal(routed[here], routed[there])

    families = list(range(len(samples)))
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length:
            alike = firsts.setdefault(samples.token_ids[start : start + length].tobytes(), [])
            families[index] = next((first for first in alike if routed_alike(first, index)), index)
            if families[index] == index:
                alike.append(index)
    return Prefixes(families=families, lengths=lengths)
