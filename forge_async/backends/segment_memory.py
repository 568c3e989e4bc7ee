"""What the segments of a store are made of, seen from the store that owns them and from its clients.

Everything else about segments, who holds which and when one is used again, is the same for each kind.

The kind here is anonymous files (memfd) of the store's process, which clients of the same host open through /proc.
They have no name that could be left behind: the kernel frees them when the store and all who map them are gone, killed
or not.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable
from typing import Protocol

import torch

from forge_async.core.errors import WeightsError
from forge_async.weights.segments import Segment


class Memory(Protocol):
    """The memory of a store's segments, in its own process."""

    def create(self, number: int, num_bytes: int) -> Segment:
        """A new segment, its pages allocated."""
        ...

    def tensor(self, segment: Segment) -> torch.Tensor:
        """A segment's memory, uint8 [num_bytes]."""
        ...

    def destroy(self, segment: Segment) -> None:
        """Give a segment back to the system."""
        ...


class Access(Protocol):
    """How a client on the store's host gets at such memory."""

    def open(self, segment: Segment, *, writable: bool) -> torch.Tensor:
        """The segment's memory, uint8 [num_bytes], the store's own and no copy."""
        ...

    def settle(self) -> None:
        """Return when all that this process has begun to write to segments, or to read from them, is done."""
        ...


class Mappings:
    """Segments as this process has them open. To open one costs a fault a page, so it lasts as long as the segment."""

    def __init__(self, open_segment: Callable[..., torch.Tensor]) -> None:
        """`open_segment`: an `Access`'s."""
        self._open = open_segment
        self._tensors: dict[tuple[int, bool], torch.Tensor] = {}

    def tensor(self, segment: Segment, *, writable: bool = False) -> torch.Tensor:
        """The segment's memory, uint8."""
        key = (segment.id, writable)
        if key not in self._tensors:
            self._tensors[key] = self._open(segment, writable=writable)
        return self._tensors[key]

    def keep(self, live: frozenset[int]) -> None:
        """Let go of segments that are not among these ids."""
        for key in [key for key in self._tensors if key[0] not in live]:
            del self._tensors[key]


class MemfdMemory:
    """Anonymous files of this process."""

    def __init__(self) -> None:
        self._descriptors: dict[int, int] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def create(self, number: int, num_bytes: int) -> Segment:
        descriptor = self._descriptors[number] = os.memfd_create(f"forge_async-weights-{number}", os.MFD_CLOEXEC)
        os.posix_fallocate(descriptor, 0, num_bytes)
        return Segment(id=number, num_bytes=num_bytes, address=f"/proc/{os.getpid()}/fd/{descriptor}")

    def tensor(self, segment: Segment) -> torch.Tensor:
        if segment.id not in self._tensors:
            self._tensors[segment.id] = _mapped(self._descriptors[segment.id], segment.num_bytes, writable=True)
        return self._tensors[segment.id]

    def destroy(self, segment: Segment) -> None:
        self._tensors.pop(segment.id, None)
        os.close(self._descriptors.pop(segment.id))


class MemfdAccess:
    """Such files, mapped. A process that writes to what it did not open to write to is ended by the kernel."""

    def open(self, segment: Segment, *, writable: bool) -> torch.Tensor:
        try:
            descriptor = os.open(segment.address, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise WeightsError(f"The store's memory cannot be opened ({error}); its process has ended.") from error
        try:
            return _mapped(descriptor, segment.num_bytes, writable=writable)
        finally:
            os.close(descriptor)

    def settle(self) -> None:
        """At once: a processor's reads and writes are done when they return."""


def _mapped(descriptor: int, num_bytes: int, *, writable: bool) -> torch.Tensor:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    populate = getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED | populate, prot=protection)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
