"""JSON lines that a killed run leaves readable: whole lines, flushed one by one, valid JSON whatever the numbers."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_TAIL_CHUNK_BYTES = 1 << 16


def plain(value: Any) -> Any:
    """Return `value` in JSON's own types: numpy becomes Python, and a number that is not finite becomes null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _foreign(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic, Mapping)):
        return plain(value)
    raise TypeError(f"{type(value).__name__} is not JSON.")


_dumps = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(", ", ": "), default=_foreign
).encode


def encode(value: Any) -> bytes:
    """One JSON value as UTF-8 on one line, without the newline. Text that is not valid Unicode is written with `?`."""
    try:
        text = _dumps(value)
    except (ValueError, TypeError):  # a number that is not finite, or keys that are not text: rare, and slow
        text = _dumps(plain(value))
    return text.encode("utf-8", errors="replace")


class JsonlWriter:
    """Appends objects to a file, one a line. A line torn by a killed writer is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            cut_torn_line(path)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one object; it is in the file when this returns."""
        self.write_many([row])

    def write_many(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append several objects with one write."""
        self._file.write(b"".join(encode(row) + b"\n" for row in rows))
        self._file.flush()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, oldest first; nothing when the file is absent.

    A last line without its newline is what a killed writer left and is passed over in silence; any other line that
    is not a JSON object is passed over with a warning.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and (row := _parse(line, path, number)) is not None:
                yield row


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if isinstance(row, dict):
        return row
    logger.warning("%s line %d is not a JSON object and is passed over.", path, number)
    return None


def cut_torn_line(path: Path) -> None:
    """Truncate `path` after its last newline, to nothing when it has none."""
    with path.open("r+b") as file:
        end = position = file.seek(0, 2)
        while position > 0:
            start = max(0, position - _TAIL_CHUNK_BYTES)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
