"""CPU seconds of a run's processes by what they are, read from Linux's /proc while it runs.

The run's own records hold the CPU seconds of learner, policy and rollout workers, but not of the controller, the replay
actor and the store; from outside all are read the same way. A process is known by the log file that its output goes to.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forge_async.observe.process_stats import process_stats

CONTROLLER, REWARD, OTHER = "controller", "reward", "other"
CONTROL_PLANE = (CONTROLLER, "replay", "rollout", "store", OTHER)
"""What neither generates, nor scores, nor trains. `other` is what a controller starts beside actors: its guardian."""


@dataclass(slots=True)
class CpuLog:
    """CPU seconds used so far, by role, at moments of the wall clock."""

    times_s: list[float] = field(default_factory=list)
    readings: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, time_s: float, reading: Mapping[str, float]) -> None:
        """Append a reading; later than those before."""
        self.times_s.append(time_s)
        self.readings.append(reading)

    def at(self, role: str, time_s: float) -> float:
        """CPU seconds of a role at a moment, linear between readings."""
        if not self.times_s:
            return 0.0
        after = min(max(bisect_left(self.times_s, time_s), 1), len(self.times_s) - 1)
        if after == 0:
            return self.readings[0].get(role, 0.0)
        (t0, t1), (a, b) = self.times_s[after - 1 : after + 1], self.readings[after - 1 : after + 1]
        share = min(max((time_s - t0) / (t1 - t0), 0.0), 1.0) if t1 > t0 else 1.0
        return a.get(role, 0.0) + share * (b.get(role, 0.0) - a.get(role, 0.0))

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """CPU seconds of each role between two moments."""
        roles = dict.fromkeys(role for reading in self.readings for role in reading)
        return {role: self.at(role, end_s) - self.at(role, start_s) for role in roles}


class ProcessTree:
    """A process and all that it started, ended ones remembered."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._cpu_s: dict[int, float] = {}
        self._roles: dict[int, str] = {}

    def read(self) -> dict[str, float]:
        """CPU seconds used so far, by role."""
        parents = parents_by_pid()
        logs: dict[int, str] = {}
        for pid in descendants(self._root, parents):
            logs[pid] = log_name(pid)
            stats = process_stats(pid)
            if stats is not None:
                self._cpu_s[pid] = stats.cpu_s
                self._roles[pid] = self._role(pid, parents.get(pid, 0), logs)
        total: dict[str, float] = {}
        for pid, cpu_s in self._cpu_s.items():
            total[self._roles[pid]] = total.get(self._roles[pid], 0.0) + cpu_s
        return total

    def _role(self, pid: int, parent: int, logs: Mapping[int, str]) -> str:
        """An actor is known by its log; what an actor starts inherits that log and counts to it, or as its rewards."""
        if pid == self._root:
            return CONTROLLER
        above = self._roles.get(parent, OTHER)
        if logs[pid] and logs[pid] != logs.get(parent):
            return actor_kind(logs[pid])
        if above == "rollout":
            return REWARD
        return OTHER if above == CONTROLLER else above


def actor_kind(log: str) -> str:
    """`policy_0-0.log` -> `policy`: the file's name without replica and rank."""
    return re.sub(r"(_\d+)?-\d+\.log$", "", log)


def log_name(pid: int) -> str:
    """Name of the file in a run's `logs` folder that a process writes its output to; "" when there is none."""
    try:
        target = Path(f"/proc/{pid}/fd/1").readlink()
    except OSError:
        return ""
    return target.name if target.parent.name == "logs" and target.suffix == ".log" else ""


def parents_by_pid() -> dict[int, int]:
    """The parent of every process of this machine; empty where there is no /proc."""
    found = {}
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        if entry.name.isdigit():
            try:
                found[int(entry.name)] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
    return found


def descendants(root: int, parents: Mapping[int, int]) -> list[int]:
    """`root` and all below it, parents before children."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found
