"""The file of a trace: one event a line inside a JSON object, whole after every append."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_async.observe.jsonl import encode

_HEAD = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
_TAIL = b"\n]}\n"


class TraceFile:
    """Appends events. An existing trace is continued after its last whole event; any other file is set aside."""

    def __init__(self, path: Path) -> None:
        self.lanes: dict[str, int] = {}
        """Number (pid of the format) of each named lane, also of lanes that an earlier session wrote."""
        self._end = self._recover(path) if path.exists() else None
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        if self._end is None:
            self._put(_HEAD + _TAIL, 0)
            self._end = len(_HEAD)
        self._empty = self._end == len(_HEAD)

    def append(self, events: Sequence[dict[str, Any]]) -> None:
        """Add events; the file is valid JSON before and after."""
        assert self._end is not None
        text = b",\n".join(map(encode, events))
        if not self._empty:
            text = b",\n" + text
        self._put(text + _TAIL, self._end)
        self._end += len(text)
        self._empty = False

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _put(self, data: bytes, position: int) -> None:
        end = position + len(data)
        while data:
            written = os.pwrite(self._file, data, position)
            data, position = data[written:], position + written
        os.ftruncate(self._file, end)

    def _recover(self, path: Path) -> int | None:
        """Find the end of the last whole event and the lanes; None, with the file renamed, when it is no trace."""
        with path.open("rb") as file:
            if file.readline() == _HEAD:
                end = len(_HEAD)
                for line in file:
                    event = _parse(line)
                    if event is None:
                        return end
                    self._learn_lane(event)
                    end += len(line.rstrip(b",\n")) + (2 if end > len(_HEAD) else 0)
                return end
        path.replace(path.with_name(f"{path.name}.unreadable"))
        return None

    def _learn_lane(self, event: dict[str, Any]) -> None:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            self.lanes[event["args"]["name"]] = event["pid"]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line.rstrip(b",\n"))
    except ValueError:
        return None
    return event if isinstance(event, dict) else None
