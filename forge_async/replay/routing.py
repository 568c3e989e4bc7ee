"""How the groups that may be in flight are shared among replicas of different speed. `docs/staleness.md` says why.

There is no clock here. A replica's speed is the part that it had in the groups that were made lately, and its fair
share of what can be in flight is as large: then every replica takes about as long for what it holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

MEMORY_BATCHES = 8
"""Speeds are measured over the groups made last, as many as so many batches hold."""

PRIOR_PARTS = 16
"""One part in so many (and one) of all shares is given out evenly: nobody is forgotten, and noise stays small."""


class Routing:
    """Which replica made the latest groups. Not in the journal: a resumed run measures anew."""

    def __init__(self, groups_per_step: int) -> None:
        """`groups_per_step`: P."""
        self._memory = MEMORY_BATCHES * groups_per_step
        self._made: deque[str] = deque()
        """Who made the latest groups, oldest first, at most `_memory`."""
        self._counts: Counter[str] = Counter()

    def joined(self, replica: str, others: Collection[str]) -> None:
        """A newcomer counts as fast as the mean of the others until it was measured."""
        known = sum(self._counts[other] for other in others)
        for _ in range(known // len(others) if others else 0):
            self.made(replica)

    def left(self, replica: str) -> None:
        """Forget a replica; a successor of the same name is measured anew."""
        self._counts.pop(replica, None)
        self._made = deque(name for name in self._made if name != replica)

    def made(self, replica: str) -> None:
        """A replica made a group that can be trained on, or one that a filter ended; failures are no speed."""
        self._made.append(replica)
        self._counts[replica] += 1
        if len(self._made) > self._memory:
            self._counts[self._made.popleft()] -= 1

    def fair_share(self, replica: str, rivals: Collection[str], pool: int) -> int:
        """How many of `pool` groups the replica should have in flight, at least one when the pool has one.

        Args:
            replica: who asks.
            rivals: the others that the pool is shared with.
            pool: groups that are in flight with them all, or could be.
        """
        num = len(rivals) + 1
        weight = self._weight(replica, num)
        total = weight + sum(self._weight(rival, num) for rival in rivals)
        return -(-pool * weight // total)

    def _weight(self, replica: str, num_replicas: int) -> int:
        return self._counts[replica] * num_replicas * PRIOR_PARTS + self._memory
