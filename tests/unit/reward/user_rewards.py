"""Reward functions as users write them, good and bad, for the pool's tests."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time
from pathlib import Path


def exact(prompt, completion, answer):
    return float(completion == answer)


def misbehave(prompt, completion, truncated, **data):
    """Do what the completion says."""
    return ACTIONS[completion](data)


def _say(data):
    print("text on standard output", flush=True)
    os.write(1, b"more of it, past Python\n")
    return 1.0


def _read(data):
    return len(sys.stdin.read())


def _backtrack(data):
    return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))  # holds the interpreter's lock for years


def _spawn(data):
    Path(data["pid_file"]).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    time.sleep(600)


ACTIONS = {
    "one": lambda data: 1,
    "true": lambda data: True,
    "raise": lambda data: 1 / 0,
    "exit": lambda data: sys.exit(3),
    "sleep": lambda data: time.sleep(600),
    "backtrack": _backtrack,
    "quit": lambda data: os._exit(7),
    "segfault": lambda data: ctypes.string_at(0),
    "nan": lambda data: float("nan"),
    "none": lambda data: None,
    "text": lambda data: "1.0",
    "say": _say,
    "read": _read,
    "pid": lambda data: os.getpid(),
    "threads": lambda data: int(os.environ["OMP_NUM_THREADS"]),
    "spawn": _spawn,
}


async def slow(completion):
    """A judge behind a network, sometimes a bad one."""
    if completion == "block":
        time.sleep(600)  # noqa: ASYNC251
    if completion == "raise":
        raise TimeoutError("the judge said so")
    await asyncio.sleep(600 if completion == "hang" else 0.1)
    return 1.0
