"""A reward worker process: `python -m forge_async.reward.server PARENT_PID PROGRESS_FD`, started by the pool.

It reads frames from its standard input and answers on its standard output; what user code prints goes to standard
error, so that it cannot corrupt an answer. The first frame says which function to load. Answers of cheap calls travel
together, so the number of the call in progress stands in a few bytes of memory shared with the parent, who reads them
when this process hangs or dies. It ends when its input ends, and dies with its parent even while user code hangs.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import mmap
import os
import pickle
import signal
import sys
import time
import traceback
from typing import Any, BinaryIO

from forge_async.core.errors import ForgeError
from forge_async.reward.frames import HEADER, PROGRESS, frame
from forge_async.reward.functions import RewardFunction, load_function

MAX_CONCURRENT = 64
"""Calls of an `async def` function that run at the same time in one worker."""
TRACEBACK_FRAMES = 4
MESSAGE_CHARACTERS = 2000
PR_SET_PDEATHSIG = 1
FLUSH_S = 0.002
"""Answers wait at most this long for others before they are sent, in seconds, unless a call hangs meanwhile."""

Call = tuple[str, str, dict[str, Any], bool]  # prompt, completion, data, truncated


def main() -> None:
    """Serve until the input ends."""
    die_with_parent(int(sys.argv[1]))
    progress = mmap.mmap(int(sys.argv[2]), PROGRESS.size)
    requests, answers = take_standard_streams()
    hello = read_frame(requests)
    if hello is None:
        return
    sys.path[:] = list(dict.fromkeys([*sys.path, *hello["sys_path"]]))
    try:
        function = load_function(hello["reference"])
    except ForgeError as error:
        write_frame(answers, {"failed": str(error)})
        return
    write_frame(answers, {"ready": True, "one_at_a_time": not function.is_async})
    serve(function, hello["timeout_s"], requests, Answers(answers, progress))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if that happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(0)


def take_standard_streams() -> tuple[BinaryIO, int]:
    """Move the protocol off file descriptors 0 and 1, so that user code reads nothing and prints to standard error."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  a descriptor is wanted, not a path
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def read_frame(requests: BinaryIO) -> Any:
    """The next request, or None when the parent closed the pipe."""
    header = requests.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    size = HEADER.unpack(header)[0]
    payload = requests.read(size)
    return pickle.loads(payload) if len(payload) == size else None


def write_frame(answers: int, message: Any) -> None:
    """Write one answer whole. Ends the process when nobody reads any more."""
    data = memoryview(frame(json.dumps(message).encode()))
    try:
        while data:
            data = data[os.write(answers, data) :]
    except BrokenPipeError:
        os._exit(0)


class Answers:
    """Answers on their way to the parent, and the number of the call in progress."""

    def __init__(self, pipe: int, progress: mmap.mmap) -> None:
        self._pipe = pipe
        self._progress = progress
        self._ready: list[Any] = []
        self._sent_s = 0.0

    def rest(self) -> None:
        """Begin to wait for answers, so that the first of a batch waits for others too."""
        self._sent_s = time.perf_counter()

    def begin(self, number: int) -> float:
        """Note that call `number` of the batch runs now; return the time, in seconds."""
        PROGRESS.pack_into(self._progress, 0, number)
        return time.perf_counter()

    def add(self, number: int, started_s: float, value: float | None, kind: str = "", text: str = "") -> None:
        """Add the answer to one call; send what is ready when the last sending is a while ago."""
        now_s = time.perf_counter()
        self._ready.append([number, value, kind, text[:MESSAGE_CHARACTERS], now_s - started_s])
        if now_s - self._sent_s > FLUSH_S:
            self.send()

    def send(self) -> None:
        """Send what is ready."""
        if self._ready:
            write_frame(self._pipe, self._ready)
            self._ready = []
        self._sent_s = time.perf_counter()


def serve(function: RewardFunction, timeout_s: float, requests: BinaryIO, answers: Answers) -> None:
    """Score batch after batch until the input ends."""
    with asyncio.Runner() as runner:
        while (batch := read_frame(requests)) is not None:
            answers.rest()
            if function.is_async:
                runner.run(serve_concurrently(function, batch, timeout_s, answers))
            else:
                for number, call in enumerate(batch):
                    serve_one(function, number, call, answers)
            answers.send()


def serve_one(function: RewardFunction, number: int, call: Call, answers: Answers) -> None:
    """Call a plain function once; whatever happens becomes an answer."""
    started_s = answers.begin(number)
    try:
        result = function.call(**bind(function, call))
    except BaseException as error:  # noqa: BLE001  user code may raise anything, SystemExit too
        answers.add(number, started_s, None, *explain(error))
    else:
        answers.add(number, started_s, *as_number(result))


async def serve_concurrently(function: RewardFunction, batch: list[Call], timeout_s: float, answers: Answers) -> None:
    """Call an `async def` function for the whole batch, at most MAX_CONCURRENT at a time, each with its deadline."""
    slots = asyncio.Semaphore(MAX_CONCURRENT)

    async def one(number: int, call: Call) -> None:
        async with slots:
            started_s = answers.begin(number)
            deadline = asyncio.timeout(timeout_s)
            try:
                async with deadline:
                    result = await function.call(**bind(function, call))
            except BaseException as error:  # noqa: BLE001
                kind, text = explain(error)
                answers.add(number, started_s, None, "hung" if deadline.expired() else kind, text)
            else:
                answers.add(number, started_s, *as_number(result))

    await asyncio.gather(*(one(number, call) for number, call in enumerate(batch)))


class MissingDataError(Exception):
    """The prompt's data lacks what the function requires."""


def bind(function: RewardFunction, call: Call) -> dict[str, Any]:
    """The keyword arguments of a call. Raises MissingDataError when a required one is absent."""
    prompt, completion, data, truncated = call
    if missing := function.missing(data):
        has = ", ".join(sorted(data)) or "no fields"
        raise MissingDataError(f"the function needs {', '.join(missing)}, but this prompt's data has {has}.")
    return function.arguments(prompt, completion, data, truncated)


def as_number(result: Any) -> tuple[float | None, str, str]:
    """(value, kind, text) of what the function returned: a finite number, or why it is not one."""
    if type(result) is float and math.isfinite(result):
        return result, "", ""
    shown = f"it returned {type(result).__name__} {str(result)[:80]!r}; return a finite float."
    if isinstance(result, (str, bytes)) or not hasattr(result, "__float__"):
        return None, "not_a_number", shown
    try:
        value = float(result)
    except Exception as error:  # noqa: BLE001  such as a tensor of several numbers
        return None, "not_a_number", f"{shown} ({error})"
    return (value, "", "") if math.isfinite(value) else (None, "not_a_number", shown)


def explain(error: BaseException) -> tuple[str, str]:
    """(kind, text) of what a call raised: its last line first, then where in the user's code it came from."""
    if isinstance(error, MissingDataError):
        return "missing_data", str(error)
    frames = [entry for entry in traceback.extract_tb(error.__traceback__) if entry.filename != __file__]
    lines = traceback.format_list(frames[-TRACEBACK_FRAMES:])
    return "raised", f"{type(error).__name__}: {error}\n{''.join(lines)}".rstrip()


if __name__ == "__main__":
    main()
