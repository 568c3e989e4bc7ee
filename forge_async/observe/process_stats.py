"""Memory and CPU time of a process, from Linux's /proc."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forge_async.observe import names

_UTIME, _STIME, _RSS = 11, 12, 21
"""Fields of /proc/<pid>/stat, counted after the command name, which may hold spaces and brackets (proc(5))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStats:
    """What a process holds and has used."""

    rss_bytes: int
    """Resident memory, shared pages included."""
    cpu_s: float
    """CPU seconds since it began, user and system, all threads, without its children."""


def process_stats(pid: int) -> ProcessStats | None:
    """Stats of a process; None when it has ended, is a zombie, or the system has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return ProcessStats(
        rss_bytes=int(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE"),
        cpu_s=(int(fields[_UTIME]) + int(fields[_STIME])) / os.sysconf("SC_CLK_TCK"),
    )


def memory_metrics(pids: Mapping[str, int]) -> dict[str, float]:
    """`memory/rss_bytes` of all processes together, and of each under its name. Ended processes are left out.

    Pages that processes share count once for each, so that the sum may be more than the machine holds.
    """
    found = {name: stats.rss_bytes for name, pid in pids.items() if (stats := process_stats(pid))}
    each = {names.per_process(names.RSS_BYTES, name): float(rss_bytes) for name, rss_bytes in found.items()}
    return {names.RSS_BYTES: float(sum(found.values())), **each}


def own_stats() -> ProcessStats:
    """Stats of the calling process; zeros where the system has no /proc."""
    return process_stats(os.getpid()) or ProcessStats(rss_bytes=0, cpu_s=0.0)
