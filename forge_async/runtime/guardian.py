"""A small process that cleans up after a controller which cannot: killed outright, nothing of its run may be left.

It holds the reading end of a pipe. The controller writes what it starts; when the pipe closes without a word of
farewell, the controller is dead, and the guardian kills what was written and removes the files. It runs this file as a
script, on the standard library alone, so that it costs a few MB and starts at once.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

GRACE_S = 1.0
"""What the kernel's own parent-death signals get before the guardian kills."""


class Guardian:
    """The controller's side: tells the guardian process what to end."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", str(Path(__file__).resolve())]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, text=True, start_new_session=True, cwd="/"
        )

    @property
    def pid(self) -> int:
        """Pid of the guardian process."""
        return self._process.pid

    def add_process(self, pid: int, *, started: int = 0, session: bool = False) -> None:
        """End this process and its process group, or with `session` all of its session.

        `started` is its start time in clock ticks; 0 looks it up now.
        """
        self._tell({"pid": pid, "started": started or start_ticks(pid), "session": session})

    def add_path(self, pattern: str | Path) -> None:
        """Remove these files or folders; a glob pattern."""
        self._tell({"path": str(pattern)})

    def dismiss(self) -> None:
        """All was cleaned up: let the guardian end without acting."""
        self._tell({"farewell": True})
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)

    def _tell(self, word: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # without a guardian the run goes on
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(word) + "\n")
            self._process.stdin.flush()


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone."""
    fields = _fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def _fields(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def main(words: TextIO) -> None:
    """Listen until the controller is gone, then clean up unless it said farewell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heard = []
    for line in words:
        with contextlib.suppress(json.JSONDecodeError):
            heard.append(json.loads(line))
    if any("farewell" in word for word in heard):
        return
    time.sleep(GRACE_S)
    targets = [word for word in heard if "pid" in word]
    for _ in range(20):
        if sum(map(_kill, targets)) == 0:
            break
        time.sleep(0.1)
    for word in heard:
        if "path" in word:
            _remove(word["path"])


def _kill(word: dict[str, Any]) -> bool:
    """Kill what is left of one target; whether anything was."""
    members = _members(word["pid"], word["session"])
    if word["pid"] in members and start_ticks(word["pid"]) != word["started"]:
        return False  # the number belongs to a later process
    for pid in members:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return bool(members)


def _members(leader: int, session: bool) -> set[int]:
    """Live pids of a process group, or of a session, by its leader's pid. It outlives the leader."""
    found = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            belongs = (os.getsid(pid) if session else os.getpgid(pid)) == leader
            if belongs and pid != os.getpid() and (_fields(pid) or ["Z"])[0] not in "ZX":
                found.add(pid)
    return found


def _remove(pattern: str) -> None:
    for path in glob.glob(pattern):  # noqa: PTH207
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108


if __name__ == "__main__":
    main(sys.stdin)
