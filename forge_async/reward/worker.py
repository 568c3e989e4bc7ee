"""The parent's side of one reward process: starts it, feeds it, and ends it when it hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import pickle
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forge_async
from forge_async.core.clock import within
from forge_async.core.errors import ConfigError, RewardError
from forge_async.reward.frames import PROGRESS, FrameBuffer, frame
from forge_async.reward.ports import FaultKind, RewardCall, RewardFault, RewardOutcome

READ_BYTES = 1 << 16
GOODBYE_S = 1.0
"""How long a worker may take to leave after its input is closed, before it is killed."""
PIPE_TO_EXIT_S = 0.2
"""How long a process may take from closing its pipe to its end; its own exit code tells more than our signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What every worker of a pool is told."""

    reference: str
    """The reward function, with an absolute path if it is a file."""
    timeout_s: float
    """Longest time one call may take, in seconds."""
    slack_s: float = 0.5
    """Added to the deadline on this side, for scheduling and transport, in seconds."""
    startup_timeout_s: float = 120.0
    """Longest time for the process to start and load the function, in seconds."""


class RewardWorker:
    """One worker process, started when it is needed and again after it was killed. Not for concurrent use."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._process: Process | None = None
        self._progress: mmap.mmap | None = None
        self._frames = FrameBuffer()
        self._closed = self._killed = False
        self.one_at_a_time = True
        """Whether the loaded function runs its calls one after another: true unless it is `async def`."""

    @property
    def pid(self) -> int | None:
        """Process id while the process runs."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Start the process unless it runs, and wait until the function is loaded.

        Raises ConfigError when it cannot be loaded, StallError when loading does not end.
        """
        if self.pid is not None and not self._killed:
            return
        if self._process is not None:
            await self._process.wait()
        await self._spawn()
        settings = self._settings
        try:
            if self._closed:
                raise RewardError("The reward pool was closed while a worker started.")
            loaded = await within(
                self._handshake(),
                settings.startup_timeout_s,
                who="the reward pool",
                waits_for=f"{settings.reference} to load",
                from_whom=f"worker process {self.pid}",
            )
        except BaseException:
            self.kill()
            raise
        self.one_at_a_time = loaded["one_at_a_time"]

    async def _spawn(self) -> None:
        self._frames, self._killed = FrameBuffer(), False
        with tempfile.TemporaryFile() as shared:  # has no name, so it cannot be left behind
            shared.truncate(PROGRESS.size)
            self._progress = mmap.mmap(shared.fileno(), PROGRESS.size)
            arguments = ("-m", "forge_async.reward.server", str(os.getpid()), str(shared.fileno()))
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                env=_environment(),
                pass_fds=(shared.fileno(),),
                start_new_session=True,
            )

    async def score(self, calls: Sequence[RewardCall], answer: Callable[[int, RewardOutcome], None]) -> list[int]:
        """Score `calls`, giving each outcome to `answer` with its number as it comes.

        Returns the numbers of calls without an outcome, because the process hung or died while they waited: score
        them again. Where calls run one at a time the guilty one is answered with its fault; where several ran at
        once it is among the returned ones, and scoring each of them alone finds it.
        """
        await self.start()
        waiting = dict.fromkeys(range(len(calls)))
        try:
            await self._exchange(calls, waiting, answer)
        except TimeoutError:
            await self._end(0.0)
            self._blame("hung", f"did not answer in {self._settings.timeout_s:g} s", calls, waiting, answer)
        except (EOFError, ConnectionError):
            how = await self._end(PIPE_TO_EXIT_S)
            self._blame("died", f"took its worker process down ({how})", calls, waiting, answer)
        except BaseException:
            self.kill()  # mid-conversation: what it still answers must not be read as answers to the next batch
            raise
        return list(waiting)

    def kill(self) -> None:
        """End the process, and what it started in its own process group, at once."""
        self._killed = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Let the process leave; kill it when it does not within a second."""
        self._closed = True
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        await self._end(GOODBYE_S)

    async def _end(self, grace_s: float) -> str:
        """Kill the process unless it ends by itself in `grace_s` seconds; say how it ended."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), grace_s)
        self.kill()
        code = await self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    async def _handshake(self) -> dict[str, Any]:
        hello = {"reference": self._settings.reference, "timeout_s": self._settings.timeout_s, "sys_path": sys.path}
        try:
            await self._send(hello)
            answer = json.loads((await self._receive())[0])
        except (EOFError, ConnectionError) as error:
            how = await self._end(PIPE_TO_EXIT_S)
            raise RewardError(
                f"{self._settings.reference} took its worker process down ({how}) while loading."
            ) from error
        if "failed" in answer:
            raise ConfigError(answer["failed"])
        return answer

    async def _exchange(
        self, calls: Sequence[RewardCall], waiting: dict[int, None], answer: Callable[[int, RewardOutcome], None]
    ) -> None:
        assert self._progress is not None
        PROGRESS.pack_into(self._progress, 0, -1)
        limit_s = self._settings.timeout_s + self._settings.slack_s
        now_s = asyncio.get_running_loop().time
        async with asyncio.timeout(limit_s) as deadline:
            # The calls of a group have one and the same data, which pickle then writes once.
            data = [call.data if type(call.data) is dict else dict(call.data) for call in calls]
            await self._send(
                [(call.prompt, call.completion, each, call.truncated) for call, each in zip(calls, data, strict=True)]
            )
            while waiting:
                for payload in await self._receive():
                    for number, *rest in json.loads(payload):
                        waiting.pop(number)
                        answer(number, self._outcome(calls[number], *rest))
                deadline.reschedule(now_s() + limit_s)

    async def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)))
        await self._process.stdin.drain()

    async def _receive(self) -> list[bytes]:
        """At least one frame. Raises EOFError when the process closed its end."""
        assert self._process is not None and self._process.stdout is not None
        payloads: list[bytes] = []
        while not payloads:
            data = await self._process.stdout.read(READ_BYTES)
            if not data:
                raise EOFError
            payloads = self._frames.feed(data)
        return payloads

    def _outcome(
        self, call: RewardCall, value: float | None, kind: FaultKind, text: str, elapsed_s: float
    ) -> RewardOutcome:
        if value is not None:
            return RewardOutcome(value=value, elapsed_s=elapsed_s)
        if kind == "hung":
            text = f"did not answer in {self._settings.timeout_s:g} s"
        return self._fault(kind, text, call, elapsed_s)

    def _fault(self, kind: FaultKind, text: str, call: RewardCall, elapsed_s: float) -> RewardOutcome:
        verbs = {"raised": " raised ", "not_a_number": ": ", "missing_data": ": "}
        what = f"reward function {self._settings.reference}{verbs.get(kind, ' ')}"
        where = f"[prompt {_excerpt(call.prompt)}, completion {_excerpt(call.completion)}]"
        head, newline, tail = text.partition("\n")
        return RewardOutcome(
            error=RewardFault(kind=kind, message=f"{what}{head} {where}{newline}{tail}"), elapsed_s=elapsed_s
        )

    def _blame(
        self,
        kind: FaultKind,
        text: str,
        calls: Sequence[RewardCall],
        waiting: dict[int, None],
        answer: Callable[[int, RewardOutcome], None],
    ) -> None:
        """Give the fault to the call in progress; to none when several ran at once."""
        assert self._progress is not None
        if not waiting or not (self.one_at_a_time or len(calls) == 1):
            return
        begun = PROGRESS.unpack_from(self._progress)[0]
        number = begun if begun in waiting else next(iter(waiting))
        waiting.pop(number)
        elapsed_s = self._settings.timeout_s if kind == "hung" else 0.0
        answer(number, self._fault(kind, text, calls[number], elapsed_s))


def _environment() -> dict[str, str]:
    """This process's environment, one thread for maths, and a path on which the worker finds forge_async."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(forge_async.__file__).absolute().parents[1]
    if root.name != "site-packages":  # a checkout that is not installed
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
