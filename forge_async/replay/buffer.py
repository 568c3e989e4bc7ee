"""The payloads of ready groups, by admission index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A ready group, with what was worked out of it as it came in."""

    group: Group
    oldest_steps: np.ndarray
    """int32 [N], `Samples.oldest_steps` of its samples."""
    num_bytes: int
    """Bytes of its arrays."""


class Buffer:
    """What the ledger only counts: the arrays themselves."""

    def __init__(self) -> None:
        self._held: dict[int, Held] = {}
        self.num_tokens = 0
        """Tokens held, prompts included."""
        self.num_bytes = 0
        """Bytes of the arrays held."""

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Held:
        return self._held[index]

    def put(self, group: Group, oldest_steps: np.ndarray) -> None:
        """Keep a group, and the steps of its samples' oldest tokens, in place of what was kept under its index."""
        self.drop(group.index)
        held = Held(group=group, oldest_steps=oldest_steps, num_bytes=group_bytes(group))
        self._held[group.index] = held
        self.num_tokens += group.samples.num_tokens
        self.num_bytes += held.num_bytes

    def drop(self, index: int) -> Group | None:
        """Let go of a group and return it; None if it was not here."""
        held = self._held.pop(index, None)
        if held is None:
            return None
        self.num_tokens -= held.group.samples.num_tokens
        self.num_bytes -= held.num_bytes
        return held.group

    def drop_all(self, indices: Iterable[int]) -> list[Group]:
        """Let go of those of `indices` that are here, and return them in that order."""
        return [group for group in map(self.drop, indices) if group is not None]


def group_bytes(group: Group) -> int:
    """Bytes of a group's arrays."""
    samples, versions = group.samples, group.samples.versions
    columns = (samples.lengths, samples.token_ids, samples.loss_mask, samples.logprobs, samples.advantages)
    arrays = [*columns, versions.lengths, versions.steps, versions.incarnations, group.rewards]
    arrays += [column for column in (samples.kept_set, samples.routed_experts) if column is not None]
    return sum([array.nbytes for array in arrays])
