"""The journal: an append-only file of events, one JSON object a line, from which the ledger can be rebuilt.

What `append` was given is safe from the death of this process at once, because it is with the operating system. It is
safe from the death of the machine after the next synchronisation. With the policy `step` that is each time a step is
done: one for all events in between, since resuming from version s needs nothing after Trained(s - 1).
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from forge_async.core.errors import ConfigError, ForgeError
from forge_async.replay.events import Event, Restored, Trained, from_json, to_line

FSYNC = ("step", "always", "never")
"""When to synchronise with the disk: at each step done, at each append, or when the system likes."""


LOOK_AGAIN_S = 0.1
"""Between two looks at a lock: file locks tell nobody when they are given back."""


class Journal:
    """An open journal. Use `Journal.open`."""

    def __init__(self, path: Path, file: BinaryIO, fsync: str) -> None:
        self.path = path
        self._file = file
        self._fsync = fsync

    @classmethod
    def open(cls, path: str | Path, fsync: str = "step") -> Journal:
        """Open for appending; make the file if there is none, cut off a torn last line if there is one.

        Raises ForgeError when the file cannot be read as a journal or another process has it open, ConfigError for an
        unknown `fsync`.
        """
        if fsync not in FSYNC:
            raise ConfigError(f"The journal's fsync={fsync} is not one of {', '.join(FSYNC)}.")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
        if not _lock(file):
            file.close()
            raise ForgeError(f"{path} is in use by another process of the run; wait until it has ended.")
        whole_bytes = 0
        for _, whole_bytes in _parse(path):  # noqa: B007 - only the last position is wanted
            pass
        if whole_bytes < path.stat().st_size:
            os.truncate(path, whole_bytes)
        _sync_directory(path.parent)
        return cls(path, file, fsync)

    @staticmethod
    def wait_until_free(path: str | Path, deadline_s: float) -> None:
        """Wait until no process has a journal open: those of a killed run end some seconds after it.

        Raises ForgeError after `deadline_s` seconds.
        """
        path, begun = Path(path), time.monotonic()
        while path.exists():
            with path.open("rb") as file:
                if _lock(file):
                    return
            if time.monotonic() - begun > deadline_s:
                raise ForgeError(
                    f"{path} was in use for {deadline_s:g} s: a process of the run still lives; end it, then go on."
                )
            time.sleep(LOOK_AGAIN_S)

    @staticmethod
    def read(path: str | Path) -> Iterator[Event]:
        """Yield the whole events of a journal file, read line by line, without changing it.

        Raises ForgeError naming file and line, when it comes to that line.
        """
        return (event for event, _ in _parse(Path(path)))

    def append(self, events: Sequence[Event]) -> None:
        """Write events in one piece, and synchronise as the policy says."""
        if not events:
            return
        text = "".join([to_line(event) + "\n" for event in events])
        data = memoryview(text.encode())
        while data:
            data = data[self._file.write(data) :]
        if self._fsync == "always" or (
            self._fsync == "step" and any(isinstance(event, (Trained, Restored)) for event in events)
        ):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Synchronise (unless the policy is `never`) and close; closing again does nothing."""
        if self._file.closed:
            return
        if self._fsync != "never":
            os.fsync(self._file.fileno())
        self._file.close()


def _parse(path: Path) -> Iterator[tuple[Event, int]]:
    """Yield each whole event, and the bytes up to its end; the rest of the file is a torn last line."""
    whole_bytes = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except ValueError as error:
                if not file.peek(1):
                    return
                raise ForgeError(
                    f"{path}, line {number}, is not a journal event ({line[:40]!r}...): the file was damaged or "
                    "edited; restore it from a copy, or begin again with run.overwrite=true."
                ) from error
            if not line.endswith(b"\n"):
                return
            try:
                event = from_json(record)
            except (ForgeError, AttributeError) as error:
                raise ForgeError(f"{path}, line {number}: {error}") from error
            whole_bytes += len(line)
            yield event, whole_bytes


def _lock(file: BinaryIO) -> bool:
    """Lock a file against other processes until it is closed; True also where the file system knows no locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sync_directory(directory: Path) -> None:
    """Make a new file's name as durable as its contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
