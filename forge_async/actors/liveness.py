"""Noticing that a process has ended, and saying how, within five seconds (Law 6).

Monarch's own signal takes about ten seconds. A process of this machine is watched through its pidfd, which the kernel
marks readable in the moment of its end; one on another machine is asked for a beat every second. A pid is always paired
with the start time of its process, so that a later process that reuses the number is never mistaken for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import signal
import socket
import struct
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from forge_async.core.errors import ActorDiedError

T = TypeVar("T")
Beat = Callable[[int], Awaitable[Any]]

ENDED = "ended"
POLL_S = 0.25
"""Between looks at a local process where the kernel offers no pidfd."""
BEAT_EVERY_S = 1.0
"""Between beats asked of a process on another machine."""
BEAT_DEADLINE_S = 1.5
"""How long one beat may take; two missed in a row are a death, so it is noticed in less than five seconds."""
FIRST_CAUSE_S = 0.5
"""How long to wait for the process's own end when Monarch reports a failure first: the pid tells more."""


@functools.cache
def this_machine() -> str:
    """Name of what shares this process's pids: host name, boot and pid namespace."""
    boot = _read("/proc/sys/kernel/random/boot_id")[:8]
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()}/{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return f"{socket.gethostname()}/{boot}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (state) on; empty when there is no such process."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone, or where /proc does not tell."""
    return _started(_stat_fields(pid))


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of one machine; unlike a bare pid it is never another one later."""

    pid: int
    machine: str
    """What `this_machine()` said there."""
    started: int
    """The kernel's start time, in clock ticks since boot; 0 where /proc does not tell."""
    rank: int = 0
    """Rank in its mesh."""

    @classmethod
    def current(cls, rank: int = 0) -> Process:
        """The calling process."""
        return cls(pid=os.getpid(), machine=this_machine(), started=start_ticks(os.getpid()), rank=rank)

    @property
    def host(self) -> str:
        """Name of its host."""
        return self.machine.partition("/")[0]

    @property
    def is_local(self) -> bool:
        """Whether its pid means something in this process."""
        return self.machine == this_machine()

    def is_running(self) -> bool:
        """Whether this very process runs on this machine: not ended, not a zombie, its pid not reused."""
        fields = _stat_fields(self.pid)
        return self.is_local and bool(fields) and fields[0] not in "ZX" and _started(fields) == self.started

    def open(self) -> int | None:
        """A pidfd of it, or None when it has ended and is gone. Raises OSError where the kernel has no pidfds."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if start_ticks(self.pid) != self.started:
            os.close(descriptor)
            return None
        return descriptor

    def send(self, signal_number: int) -> None:
        """Send a signal to exactly this process, if it still runs on this machine."""
        if not self.is_local:
            return
        try:
            descriptor = self.open()
        except OSError:
            if self.is_running():
                os.kill(self.pid, signal_number)
            return
        if descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal_number)
            os.close(descriptor)


def _started(fields: list[str]) -> int:
    return int(fields[19]) if len(fields) > 19 else 0


def how_it_ended(descriptor: int, pid: int) -> str:
    """Say how the process behind a readable pidfd ended. Asks the kernel, and leaves the process to its reaper.

    Monarch's runtime reaps its children as fast as it can; the status of a reaped one is known from Linux 6.15 on.
    """
    with contextlib.suppress(OSError):  # a child of ours, not reaped yet
        if (end := os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is not None:
            killed = end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
            return _killed_by(end.si_status) if killed else f"exited with code {end.si_status}"
    fields = _stat_fields(pid)  # another's child, not reaped yet
    if len(fields) > 49 and fields[0] == "Z":
        return _by_status(int(fields[49]))
    with contextlib.suppress(OSError):
        info = bytearray(_INFO_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        fcntl.ioctl(descriptor, _GET_INFO, info)
        if struct.unpack_from("Q", info, 0)[0] & _INFO_EXIT:
            return _by_status(struct.unpack_from("i", info, _INFO_SIZE - 4)[0])
    return ENDED


_INFO_SIZE, _INFO_EXIT = 64, 1 << 3
_GET_INFO = 0xC0000000 | _INFO_SIZE << 16 | 0xFF << 8 | 11
"""ioctl PIDFD_GET_INFO, with its first struct and its flag for the exit status (linux/pidfd.h)."""


def _by_status(status: int) -> str:
    return _killed_by(status & 0x7F) if status & 0x7F else f"exited with code {status >> 8}"


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    return f"was killed by {name}" + (" (perhaps for lack of memory)" if number == signal.SIGKILL else "")


class Watch:
    """Watches the processes of one actor; all who wait for that actor hear of the first one's end.

    A watch belongs to the event loop on which it is first used, and starts then.
    """

    def __init__(self, name: str, processes: Sequence[Process], beat: Beat | None = None) -> None:
        """Args:
        name: what the error calls the actor.
        processes: what to watch.
        beat: asks the process of a rank for a sign of life; needed for processes of other machines.
        """
        self.name = name
        self.processes = tuple(processes)
        self.closed = False
        """Whether the end was asked for."""
        self._beat = beat
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: asyncio.Future[str] | None = None
        self._descriptors: dict[int, Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def died(self) -> ActorDiedError | None:
        """The death, if it has been noticed."""
        if self._death is None or not self._death.done():
            return None
        return ActorDiedError(self._death.result())

    async def wait_for_death(self) -> ActorDiedError:
        """Wait until a process ends and return the error that names actor, pid and how it ended.

        After `close()` it returns too; `closed` then tells that the end was asked for.
        """
        return ActorDiedError(await asyncio.shield(self._start()))

    async def guard(self, awaitable: Awaitable[T]) -> T:
        """Await a call on the actor, but raise ActorDiedError as soon as the actor is dead.

        A Monarch SupervisionError of the call is a death too: the actor has failed even if its process lives.
        """
        death = self._start()
        if death.done():
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
            raise ActorDiedError(death.result())
        call = _as_future(awaitable)
        try:
            await asyncio.wait((call, death), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise ActorDiedError(death.result())
            return call.result()
        except SupervisionError as error:
            await asyncio.wait((death,), timeout=FIRST_CAUSE_S)
            self.declare(f"{self.name} failed: {gist(error)}")
            raise ActorDiedError(death.result()) from error
        finally:
            call.cancel()

    def declare(self, what: str) -> None:
        """Count the actor as dead for the reason given in a full sentence; the first reason stands."""
        if self._death is not None and not self._death.done():
            self._death.set_result(what)
            self._release()

    def close(self, reason: str = "it was shut down on purpose") -> None:
        """Stop watching, because the end is wanted. Calls under way fail with `reason`."""
        self.closed = True
        self.declare(f"{self.name} does not answer any more: {reason}.")
        self._release()

    def _start(self) -> asyncio.Future[str]:
        loop = asyncio.get_running_loop()
        if self._death is not None:
            if loop is not self._loop:
                raise RuntimeError(f"The watch of {self.name} is used from two event loops; give each its own handle.")
            return self._death
        self._loop, self._death = loop, loop.create_future()
        if self.closed:
            self._death.set_result(f"{self.name} was shut down.")
            return self._death
        for process in self.processes:
            self._watch(process)
        return self._death

    def _watch(self, process: Process) -> None:
        if not process.is_local:
            self._spawn(self._listen(process))
            return
        try:
            descriptor = process.open()
        except OSError:
            self._spawn(self._look(process))
            return
        if descriptor is None:
            self._died(process, "ended before it was watched")
            return
        self._descriptors[descriptor] = process
        assert self._loop is not None
        self._loop.add_reader(descriptor, self._on_end, descriptor)

    def _on_end(self, descriptor: int) -> None:
        process = self._descriptors[descriptor]
        self._died(process, how_it_ended(descriptor, process.pid))

    def _died(self, process: Process, how: str) -> None:
        self.declare(f"{self.name} (rank {process.rank}, pid {process.pid} on {process.host}) {how}.")

    def _spawn(self, watching: Any) -> None:
        task = asyncio.ensure_future(watching)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, process: Process) -> None:
        """Watch a local process where there is no pidfd."""
        while process.is_running():  # noqa: ASYNC110  nothing sets an event when a process ends
            await asyncio.sleep(POLL_S)
        self._died(process, ENDED)

    async def _listen(self, process: Process) -> None:
        """Watch a process of another machine by its beats."""
        if self._beat is None:
            raise RuntimeError(f"{self.name} runs on {process.host}: watching it from here needs its beat.")
        missed = 0
        while missed < 2:
            try:
                await asyncio.wait_for(_awaited(self._beat(process.rank)), BEAT_DEADLINE_S)
                missed = 0
                await asyncio.sleep(BEAT_EVERY_S)
            except TimeoutError:
                missed += 1
            except Exception as error:  # noqa: BLE001  whatever the transport raises, the process cannot be reached
                self._died(process, f"cannot be reached: {gist(error)}")
                return
        self._died(process, f"gave no sign of life for {2 * BEAT_DEADLINE_S:g} s")

    def _release(self) -> None:
        for descriptor in self._descriptors:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()
        for task in tuple(self._tasks):
            task.cancel()


_shared: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[Process, ...]], Watch]] = weakref.WeakKeyDictionary()


def shared_watch(name: str, processes: tuple[Process, ...], beat: Beat) -> Watch:
    """The running loop's one watch of these processes: handles come and go with messages, descriptors must not."""
    watches, key = _shared.setdefault(asyncio.get_running_loop(), {}), (name, processes)
    if key not in watches:
        watches[key] = Watch(name, processes, beat)
    return watches[key]


def _as_future(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    """Of a Monarch call the loop's own future: a task for each call would cost as much as the rest of the guard."""
    own = getattr(awaitable, "as_asyncio", None)
    return asyncio.ensure_future(_awaited(awaitable)) if own is None else own()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def gist(error: BaseException, limit: int = 500) -> str:
    """The line of Monarch's report that names the cause: the last one of a traceback, else the whole, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[-1] if any(line.endswith("Traceback (most recent call last):") for line in lines) else " ".join(lines)
    return text if len(text) <= limit else text[:limit] + " ..."
