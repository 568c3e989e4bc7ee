"""Who takes part in the broadcasts of one sender, and when they have to form a new group. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Collection


class Audience:
    """Members come one by one, and go when they do not answer. A group is of those who were there when it formed."""

    def __init__(self) -> None:
        self._members: dict[int, None] = {}
        self._formed: tuple[int, ...] | None = None
        self._num_known = 0

    @property
    def members(self) -> tuple[int, ...]:
        """Their numbers, in the order in which they joined."""
        return tuple(self._members)

    @property
    def has_group(self) -> bool:
        """Whether the group that formed last still stands, and is of exactly these members."""
        return self._formed == self.members

    def unknown(self, num_joined: int) -> range:
        """Numbers of those who joined since the last one that was added. Numbers begin with 1."""
        return range(self._num_known + 1, num_joined + 1)

    def add(self, member: int) -> None:
        """One has joined."""
        self._num_known = max(self._num_known, member)
        self._members[member] = None

    def drop(self, members: Collection[int]) -> None:
        """These do not take part any more; one that comes back joins under another number."""
        for member in members:
            self._members.pop(member, None)

    def formed(self) -> None:
        """A group of all members stands."""
        self._formed = self.members

    def broke(self) -> None:
        """The group is of no use any more: a member of it died or stalled."""
        self._formed = None
