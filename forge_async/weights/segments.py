"""Who uses which memory segment of the store: reserved, holding a key, leased by readers, or free to be used again.

Pages of a used segment are warm: writing to them is several times faster than to fresh ones. So a segment is used again
for another version, but only when nobody needs its bytes any more: its key is deleted and no reader holds a lease. A
process that dies gives back what it held.

Whether a process of another host is dead cannot be seen from here. It says for how long it will hold what it asks for,
and what it holds longer is taken from it. It may only be slow, and reach for the memory when it wakes: so memory that
was taken away is destroyed when nobody else needs it, and never used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

PAGE_BYTES = 4096
Member = TypeVar("Member")
"""A process that writes or reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A piece of memory that the store owns and others reach."""

    id: int
    """Never used twice in one store."""
    num_bytes: int
    address: Any
    """What a client reaches it by, as its kind of memory has it."""


@dataclass(frozen=True, slots=True)
class _Hold(Generic[Member]):
    member: Member
    until_s: float


@dataclass(slots=True)
class _Use(Generic[Member]):
    segment: Segment
    writer: _Hold[Member] | None = None
    key: str | None = None
    readers: list[_Hold[Member]] = field(default_factory=list)
    was_overheld: bool = False
    """Whether it was taken from somebody who may still reach for it."""

    @property
    def holds(self) -> list[_Hold[Member]]:
        return [*self.readers, *([self.writer] if self.writer is not None else [])]

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
        now_s: Callable[[], float],
    ) -> None:
        """Args:
        create: makes a segment of so many bytes.
        destroy: gives its memory back to the system.
        is_alive: whether a writer or reader (a process) still runs, for all that can be seen from here.
        now_s: the clock by which they hold what they hold.
        """
        self._create, self._destroy, self._is_alive, self._now_s = create, destroy, is_alive, now_s
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

    def reserve(self, num_bytes: int, writer: Member, hold_s: float = math.inf) -> Segment:
        """A segment of at least so many bytes for a writer to fill within `hold_s`: a free one, else a new one."""
        self.sweep()
        fitting = [use for use in self._free() if num_bytes <= use.segment.num_bytes <= 2 * num_bytes + PAGE_BYTES]
        if fitting:
            use = min(fitting, key=lambda use: use.segment.num_bytes)
        else:
            segment = self._create(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES)
            use = self._uses[segment.id] = _Use(segment)
        use.writer = _Hold(writer, self._now_s() + hold_s)
        return use.segment

    def bind(self, segment_id: int, key: str) -> None:
        """The writer has filled it: it holds `key` now. Raises KeyError for a segment that is not reserved any more."""
        use = self._uses[segment_id]
        if use.writer is None:
            raise KeyError(segment_id)
        self.unbind(key)
        use.writer, use.key = None, key
        self._by_key[key] = use

    def lease(self, key: str, reader: Member, hold_s: float = math.inf) -> Segment:
        """A reader begins, and ends within `hold_s`. Raises KeyError for a key that no segment holds."""
        use = self._by_key[key]
        use.readers.append(_Hold(reader, self._now_s() + hold_s))
        return use.segment

    def release(self, segment_id: int, reader: Member) -> None:
        """A reader ended. Ignored when it holds no lease."""
        use = self._uses.get(segment_id)
        place = next((at for at, hold in enumerate(use.readers) if hold.member == reader), None) if use else None
        if use is not None and place is not None:
            del use.readers[place]
            self._trim()

    def unbind(self, key: str) -> None:
        """The key is deleted; readers keep what they lease. Ignored for a key that no segment holds."""
        use = self._by_key.pop(key, None)
        if use is not None:
            use.key = None
            self._trim()

    def sweep(self) -> None:
        """Take back what dead processes had reserved or leased, and what was held for longer than was said."""
        now_s = self._now_s()
        members = {hold.member for use in self._uses.values() for hold in use.holds}
        alive = {member for member in members if self._is_alive(member)}
        for use in self._uses.values():
            living = [hold for hold in use.holds if hold.member in alive]
            kept = [hold for hold in living if hold.until_s > now_s]
            use.was_overheld |= len(kept) < len(living)
            use.readers = [hold for hold in use.readers if hold in kept]
            use.writer = use.writer if use.writer in kept else None
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
        for use in self._free():
            if use.was_overheld:
                self._end(use)
        free = sorted(self._free(), key=lambda use: use.segment.id)
        spare = sum(use.segment.num_bytes for use in free)
        used = self.num_bytes - spare
        for use in free:
            if spare <= used:
                return
            spare -= use.segment.num_bytes
            self._end(use)

    def _end(self, use: _Use[Member]) -> None:
        del self._uses[use.segment.id]
        self._destroy(use.segment)
