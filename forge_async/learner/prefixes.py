"""Beginnings that samples have in common: computed once for those that lie side by side in a row.

The samples of a group begin with the same prompt. What a causal model makes of a token depends on it and on those
before it alone, so one pass over the prompt serves all of them, forward and backward (Liu et al., Prefix Grouper, arXiv
2506.05433). The prompt's last token is not shared: there each sample goes on to a token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from forge_async.core.records import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Which samples begin alike, and how far."""

    families: np.ndarray
    """int64 [N], of each sample the first one that begins as it does; its own number where none does before it."""
    lengths: np.ndarray
    """int64 [N], tokens of each sample's beginning, the same in a family; less than the sample has."""

    @classmethod
    def none(cls, num_samples: int) -> Prefixes:
        """Nobody shares anything."""
        return cls(families=np.arange(num_samples), lengths=np.zeros(num_samples, np.int64))

    @property
    def any_shared(self) -> bool:
        """Whether two samples begin alike."""
        return bool(((self.families != np.arange(len(self.families))) & (self.lengths > 0)).any())

    def skipped(self, order: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """How many of each sample's first tokens its row holds already: those of the sample before it, if it is of its
        family; int64 [N] in the order given.

        Args:
            order: int [N], the samples row after row.
            rows: int [N], the row of each.
        """
        families, follows = self.families[order], np.zeros(len(order), bool)
        follows[1:] = (families[1:] == families[:-1]) & (rows[1:] == rows[:-1])
        return self.lengths[order] * follows


def row_after_row(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all rows in order, and the row's number of each; int64 [N]."""
    sizes = np.fromiter(map(len, rows), np.int64, len(rows))
    order = np.fromiter(chain.from_iterable(rows), np.int64, sizes.sum())
    return order, np.repeat(np.arange(len(rows)), sizes)


def shared_prefixes(samples: Samples) -> Prefixes:
    """All that comes before the last token of each sample's prompt, where others have the same.

    Where experts are forced on tokens, those of the beginning must be the same too.
    """
    edges, width = samples.bounds(), samples.token_ids.itemsize
    trained = np.flatnonzero(samples.loss_mask)
    first = np.append(trained, samples.num_tokens)[np.searchsorted(trained, edges[:-1])]
    # One token is left for each sample; one without a token to train on shares nothing.
    lengths = np.where(first < edges[1:], first - edges[:-1] - 1, 0).clip(min=0)
    starts, stops = (width * edges[:-1]).tolist(), (width * (edges[:-1] + lengths)).tolist()
    data, begun = samples.token_ids.tobytes(), dict[bytes, int]()
    families = [
        begun.setdefault(data[start:stop], index) if start < stop else index
        for index, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]
    if samples.routed_experts is not None:
        families = _routed_alike(samples.routed_experts, families, edges[:-1].tolist(), lengths.tolist())
    return Prefixes(families=np.array(families, dtype=np.int64), lengths=lengths)


def _routed_alike(
    routed: np.ndarray, families: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> list[int]:
    """Families, each taken apart by the experts that the tokens of its beginning took; `routed`: [T, ...]."""
    firsts: dict[int, list[int]] = {}
    """Of each beginning the first samples of each way in which its tokens were routed."""
    found: list[int] = []
    for index, (family, start, length) in enumerate(zip(families, starts, lengths, strict=True)):
        own, ways = routed[start : start + length], firsts.setdefault(family, [])
        alike = (way for way in ways if np.array_equal(routed[starts[way] : starts[way] + length], own))
        found.append(next(alike, index))
        if found[-1] == index:
            ways.append(index)
    return found
