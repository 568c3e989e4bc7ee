"""rollouts.jsonl.zst: sampled rollouts for people to read.

Every write is one whole zstd frame, so that `zstdcat` and the reader below can read a killed run's file up to its last
write, and a resumed run can append. JSON compressed step by step takes about a fifth of its size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zstandard

from forge_async.observe.jsonl import encode

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """One rollout as text."""

    step: int
    """Learner step that trained it."""
    group: int
    """Admission index of its group."""
    prompt: str
    completion: str
    reward: float
    versions: tuple[int, int] | None = None
    """Steps of the oldest and the newest version that made its tokens."""


class RolloutLog:
    """Appends rollouts to rollouts.jsonl.zst. A frame torn by a killed writer is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            _cut_torn_frame(path)
        self._file = path.open("ab")
        self._compressor = zstandard.ZstdCompressor(level=3)

    def write(self, records: Iterable[RolloutRecord]) -> None:
        """Append the rollouts of one step as one frame; they can be read when this returns."""
        lines = b"".join(encode(asdict(record)) + b"\n" for record in records)
        if lines:
            self._file.write(self._compressor.compress(lines))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rollouts of a rollouts.jsonl.zst, oldest first, up to the last whole write; nothing when absent."""
    if path.exists():
        for data, _ in _frames(path):
            yield from map(json.loads, data.splitlines())


def _frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each whole frame, decompressed, and the file position after it."""
    decompressor = zstandard.ZstdDecompressor()
    frame, parts, position, rest = decompressor.decompressobj(), [], 0, b""
    with path.open("rb") as file:
        while chunk := rest or file.read(_CHUNK_BYTES):
            try:
                parts.append(frame.decompress(chunk))
            except zstandard.ZstdError:
                return
            rest = frame.unused_data if frame.eof else b""
            position += len(chunk) - len(rest)
            if frame.eof:
                yield b"".join(parts), position
                frame, parts = decompressor.decompressobj(), []


def _cut_torn_frame(path: Path) -> None:
    end = 0
    for _, end in _frames(path):  # noqa: B007 - only the last position is wanted
        pass
    with path.open("r+b") as file:
        file.truncate(end)
