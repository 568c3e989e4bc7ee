"""The payloads of ready groups, by admission index."""

from __future__ import annotations

from collections.abc import Iterable

from forge_async.core.records import Group


class Buffer:
    """What the ledger only counts: the arrays themselves."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}
        self.num_tokens = 0
        """Tokens held, prompts included."""
        self.num_bytes = 0
        """Bytes of the arrays held."""

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> Group:
        return self._groups[index]

    def put(self, group: Group) -> None:
        """Keep a group in place of what was kept under its index."""
        self.drop(group.index)
        self._groups[group.index] = group
        self.num_tokens += group.samples.num_tokens
        self.num_bytes += group_bytes(group)

    def drop(self, index: int) -> Group | None:
        """Let go of a group and return it; None if it was not here."""
        group = self._groups.pop(index, None)
        if group is not None:
            self.num_tokens -= group.samples.num_tokens
            self.num_bytes -= group_bytes(group)
        return group

    def drop_all(self, indices: Iterable[int]) -> list[Group]:
        """Let go of those of `indices` that are here, and return them in that order."""
        return [group for group in map(self.drop, indices) if group is not None]


def group_bytes(group: Group) -> int:
    """Bytes of a group's arrays."""
    samples = group.samples
    columns = (samples.lengths, samples.token_ids, samples.loss_mask, samples.logprobs, samples.advantages)
    versions = (samples.versions.lengths, samples.versions.steps, samples.versions.incarnations)
    optional = (column for column in (samples.kept_set, samples.routed_experts) if column is not None)
    return sum(array.nbytes for array in (*columns, *versions, *optional, group.rewards))
