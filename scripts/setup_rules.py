"""The rules of set-up, apart from its steps (setup.py): texts and numbers in, decisions out. Standard library only."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable

GIB = 1 << 30

NETWORK_SIGNS = (
    "NewConnectionError",
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "SSLError",
    "ConnectionResetError",
    "IncompleteRead",
)

STAND_IN = '''"""Stands in for {name}, which could not be compiled; written by scripts/setup.py."""


def __getattr__(attribute):
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    raise ImportError(
        "{feature} needs {name}, which has to be compiled:"
        " install a C compiler and Python's headers, then pip install {name}."
    )
'''


class SetupError(Exception):
    """The set-up cannot go on; the message is one sentence that names the remedy."""


def read_pins(text: str) -> dict[str, str]:
    """Return name -> version of the `name==version` lines of a lock; comments and empty lines are skipped."""
    pins = {}
    for line in text.splitlines():
        line = line.split("#")[0].strip()
        if line:
            name, separator, version = line.partition("==")
            if not separator:
                raise SetupError(
                    f"{line!r} in the lock is not of the form name==version; regenerate it with `make lock`."
                )
            pins[name.strip().lower()] = version.strip()
    return pins


def requirement_lines(pins: dict[str, str], *, without: Iterable[str] = ()) -> str:
    """Return the pins as a requirements file, less the names in `without`."""
    left_out = set(without)
    return "".join(f"{name}=={version}\n" for name, version in pins.items() if name not in left_out)


def fingerprint(*, stack: str, python: str, root: str, lock: str, torch: str, pyproject: str) -> str:
    """Return the hash of all that decides what an installed environment is.

    Of pyproject only the tables that installation reads count: a changed linter option needs no new set-up.
    """
    tables = tomllib.loads(pyproject)
    installed = [tables.get("project"), tables.get("build-system"), tables.get("tool", {}).get("setuptools")]
    parts = [stack, python, root, sorted(read_pins(lock).items()), torch.split(), installed]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def explain(log: str) -> str:
    """Return in one clause why pip failed, from what it wrote."""
    if "No space left on device" in log:
        return "the disk is full (temporary files go to TMPDIR)"
    if any(sign in log for sign in NETWORK_SIGNS):
        return "the package index could not be reached; check the network and pip's own configuration"
    missing = re.search(r"No matching distribution found for (\S+)", log)
    if missing:
        return f"there is no file of {missing[1]} for this Python and machine"
    errors = [line for line in log.splitlines() if line.lower().startswith("error")]
    return errors[-1].rstrip(".") if errors else "pip failed without naming a reason"


def lack_of_space(*, free: int, present: int, needed: int, place: str) -> str | None:
    """Return the sentence for too little space at `place`, or None; `present` bytes of the needed are already there."""
    lacking = needed - present - free
    if lacking <= 0:
        return None
    short = (needed - present) / GIB
    return f"{place} has {free / GIB:.1f} GiB free and set-up needs {short:.1f} GiB; make room and repeat."


def unsuited_machine(*, system: str, machine: str) -> str | None:
    """Return the sentence for a machine that the locks have no packages for, or None."""
    if (system, machine) == ("Linux", "x86_64"):
        return None
    remedy = "CONTRIBUTING.md says how to bring your own"
    return f"the locked stack is for Linux on x86_64 and this is {system} on {machine}; {remedy}."


def stand_in_text(name: str, feature: str) -> str:
    """Return the source of a module that loads in place of `name` and explains itself when used."""
    return STAND_IN.format(name=name, feature=feature)
