"""Who uses which memory segment of the store: reserved, holding a key, leased by readers, or free to be used again.

Pages of a used segment are warm: writing to them is several times faster than to fresh ones. So a segment is used again
for another version, but only when nobody needs its bytes any more: its key is deleted and no reader holds a lease. A
process that dies gives back what it held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

PAGE_BYTES = 4096
Member = TypeVar("Member")
"""A process that writes or reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of memory that the store owns and others map."""

    id: int
    """Never used twice in one store."""
    num_bytes: int
    path: str
    """What a process of the same host opens to map it."""


@dataclass(slots=True)
class _Use(Generic[Member]):
    segment: Segment
    writer: Member | None = None
    key: str | None = None
    readers: Counter[Member] = field(default_factory=Counter)

    @property
    def is_free(self) -> bool:
        return self.writer is None and self.key is None and not self.readers


class SegmentPool(Generic[Member]):
    """Bookkeeping only; `create` and `destroy` do the work."""

    def __init__(
        self,
        create: Callable[[int], Segment],
        destroy: Callable[[Segment], None],
        is_alive: Callable[[Member], bool],
    ) -> None:
        """Args:
        create: makes a segment of so many bytes.
        destroy: gives its memory back to the system.
        is_alive: whether a writer or reader (a process) still runs.
        """
        self._create, self._destroy, self._is_alive = create, destroy, is_alive
        self._uses: dict[int, _Use[Member]] = {}
        self._by_key: dict[str, _Use[Member]] = {}

    @property
    def live(self) -> frozenset[int]:
        """Ids of all segments; whoever has another one mapped may let go of it."""
        return frozenset(self._uses)

    @property
    def num_bytes(self) -> int:
        """Memory of all segments."""
        return sum(use.segment.num_bytes for use in self._uses.values())

    def reserve(self, num_bytes: int, writer: Member) -> Segment:
        """A segment of at least so many bytes for a writer to fill: a free one, else a new one."""
        self.sweep()
        fitting = [use for use in self._free() if num_bytes <= use.segment.num_bytes <= 2 * num_bytes + PAGE_BYTES]
        if fitting:
            use = min(fitting, key=lambda use: use.segment.num_bytes)
        else:
            segment = self._create(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
            use = self._uses[segment.id] = _Use(segment)
        use.writer = writer
        return use.segment

    def bind(self, segment_id: int, key: str) -> None:
        """The writer has filled it: it now holds `key`. Raises KeyError for a segment that was not reserved."""
        use = self._uses[segment_id]
        if use.writer is None:
            raise KeyError(segment_id)
        self.unbind(key)
        use.writer, use.key = None, key
        self._by_key[key] = use

    def lease(self, key: str, reader: Member) -> Segment:
        """A reader begins. Raises KeyError for a key that no segment holds."""
        use = self._by_key[key]
        use.readers[reader] += 1
        return use.segment

    def release(self, segment_id: int, reader: Member) -> None:
        """A reader ended. Ignored when it holds no lease."""
        use = self._uses.get(segment_id)
        if use is not None and use.readers[reader] > 0:
            use.readers[reader] -= 1
            use.readers += Counter()  # drops zeros
            self._trim()

    def unbind(self, key: str) -> None:
        """The key is deleted; readers keep what they lease. Ignored for a key that no segment holds."""
        use = self._by_key.pop(key, None)
        if use is not None:
            use.key = None
            self._trim()

    def sweep(self) -> None:
        """Take back what dead processes had reserved or leased."""
        members = {use.writer for use in self._uses.values() if use.writer is not None}
        members |= {reader for use in self._uses.values() for reader in use.readers}
        dead = {member for member in members if not self._is_alive(member)}
        for use in self._uses.values() if dead else ():
            if use.writer in dead:
                use.writer = None
            for reader in dead:
                use.readers.pop(reader, None)
        self._trim()

    def close(self) -> None:
        """Destroy all segments, used or not."""
        for use in self._uses.values():
            self._destroy(use.segment)
        self._uses.clear()
        self._by_key.clear()

    def _free(self) -> list[_Use[Member]]:
        return [use for use in self._uses.values() if use.is_free]

    def _trim(self) -> None:
        """Keep no more free memory than is in use: that is one version's worth when versions follow each other."""
        free = sorted(self._free(), key=lambda use: use.segment.id)
        spare = sum(use.segment.num_bytes for use in free)
        used = self.num_bytes - spare
        for use in free:
            if spare <= used:
                return
            spare -= use.segment.num_bytes
            del self._uses[use.segment.id]
            self._destroy(use.segment)
