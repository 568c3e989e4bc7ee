"""How many groups a replica's engine still generates: what would only queue there stays free for every replica.

A group that is given away early waits behind others in one engine while another engine runs empty. With one replica
there is no other, and nothing is kept back. `docs/staleness.md` tells what this is worth.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge_async.replay.book import Book
from forge_async.replay.bound import UNLIMITED
from forge_async.replay.entry import State

AHEAD = 1
"""Groups beyond what an engine runs at once, so that it has the next one at hand while it asks for more."""


def groups_at_once(num_replicas: int, max_sequences: int, group_size: int) -> int | None:
    """Most groups that a replica should generate or queue; None: as many as it likes.

    Args:
        num_replicas: of the run.
        max_sequences: sequences that an engine decodes together.
        group_size: sequences of a group.
    """
    return None if num_replicas == 1 else -(-max_sequences // group_size) + AHEAD


class Generating:
    """The groups in flight whose tokens are not all made. Not in the journal: a resumed run begins all of them anew."""

    def __init__(self, book: Book, most: int | None) -> None:
        """`most` groups for each replica, see `groups_at_once`."""
        self._book, self._most = book, most
        self._done: dict[str, dict[int, int]] = {}
        """By replica the groups that only their rewards are awaited of: index, and the try that said so."""

    def finished(self, tries: Iterable[tuple[int, int]]) -> bool:
        """The tokens of these groups, (index, attempt), are all made. Returns whether that freed anything."""
        awaited = [(index, attempt) for index, attempt in tries if self._is_awaited(index, attempt)]
        for index, attempt in awaited:
            self._done.setdefault(self._book.entries[index].replica, {})[index] = attempt
        return bool(awaited)

    def made_by(self, replica: str) -> tuple[int, ...]:
        """The groups in flight of which only the rewards are awaited, of a replica that is gone; it is forgotten."""
        done = self._done.pop(replica, {})
        return tuple(sorted(index for index, attempt in done.items() if self._is_awaited(index, attempt)))

    def room(self, replica: str) -> int:
        """How many more groups the engine can use now; 0 or less: none."""
        if self._most is None:
            return UNLIMITED
        done = self._done[replica] = {
            index: attempt for index, attempt in self._done.get(replica, {}).items() if self._is_awaited(index, attempt)
        }
        return self._most - (self._book.in_flight[replica] - len(done))

    def _is_awaited(self, index: int, attempt: int) -> bool:
        """Whether that try of a group is the one in flight."""
        entry = self._book.entries.get(index)
        return entry is not None and entry.state is State.IN_FLIGHT and entry.attempt == attempt
