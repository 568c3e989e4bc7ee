"""Length-prefixed frames over a pipe: what the pool and its worker processes speak."""

from __future__ import annotations

import struct

HEADER = struct.Struct(">I")
"""Length of the payload, in bytes."""
PROGRESS = struct.Struct("<q")
"""Number of the call in progress, in memory that a worker shares with its parent."""


def frame(payload: bytes) -> bytes:
    """The payload with its length in front."""
    return HEADER.pack(len(payload)) + payload


class FrameBuffer:
    """Cuts a stream of bytes, as it arrives, into payloads."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the payloads that are now whole, in order."""
        self._bytes += data
        payloads, start = [], 0
        while len(self._bytes) - start >= HEADER.size:
            end = start + HEADER.size + HEADER.unpack_from(self._bytes, start)[0]
            if end > len(self._bytes):
                break
            payloads.append(bytes(self._bytes[start + HEADER.size : end]))
            start = end
        del self._bytes[:start]
        return payloads
