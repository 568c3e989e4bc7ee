"""Starting and ending the processes that actors live in: environment, GPUs, logs, a beat in each, no orphans."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import re
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "910737418240")  # torchstore's own value; it warns if unset

import monarch.actor  # noqa: E402  after the variable, which Monarch reads when it is imported
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand  # noqa: E402
from monarch.actor import Actor, HostMesh, ProcMesh, current_rank, default_bootstrap_cmd, endpoint  # noqa: E402

from forge_async.actors.liveness import Beat, Process, Watch, gist  # noqa: E402
from forge_async.core.clock import within  # noqa: E402
from forge_async.core.errors import ActorDiedError, ConfigError, ForgeError  # noqa: E402
from forge_async.core.garbage import settle_heap  # noqa: E402

log = logging.getLogger(__name__)

PROCS = "procs"
"""Label of the mesh dimension that counts the processes of one host."""

on_start: list[Callable[[Process], None]] = []
"""Called with each process that was started, so that a guardian outside this process can end it if this one cannot."""
before_stop_all: list[Callable[[], Any]] = []
"""Called when all is about to be ended, by those who would otherwise start anew what ends."""
faults: deque[str] = deque(maxlen=200)
"""What Monarch reported as unhandled faults, newest last. A death is noticed, and acted on, by `Watch` well before."""


def _on_fault(failure: Any) -> None:
    """Keep a Monarch fault from ending the client (exit 130): record it. Runs on a thread of Monarch's."""
    text = " ".join(str(failure).split())
    faults.append(text)
    log.info("Monarch reports: %s", text)


monarch.actor.unhandled_fault_hook = _on_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts that processes are started on, and what all of those processes get."""

    mesh: HostMesh
    name: str = "this host"
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables set before the interpreter of each process starts."""
    log_dir: str = ""
    """Folder for the processes' output, a file each; empty: it goes where this process's output goes."""
    num_gpus: int | None = None
    """GPUs of each host; None: not known here, so not checked."""
    first: int = 0
    """Index of the first host in the mesh that these were taken from."""

    @property
    def num_hosts(self) -> int:
        """How many hosts."""
        return self.mesh.region.slice().sizes[0] if self.mesh.region.labels else 1

    def one(self, index: int) -> Hosts:
        """One of the hosts, counted round and round."""
        if self.num_hosts == 1:
            return self
        index %= self.num_hosts
        mesh = self.mesh.slice(**{self.mesh.region.labels[0]: index})
        return dataclasses.replace(self, mesh=mesh, first=self.first + index)


class Pulse(Actor):
    """Lives beside the user's actor in every process, on a thread of its own: it beats while the other works."""

    def __init__(self, log_stem: str) -> None:
        if log_stem:
            _write_output_to(Path(f"{log_stem}-{current_rank().rank}.log"))

    @endpoint
    async def beat(self) -> Process:
        """A sign of life: who this process is."""
        return Process.current(rank=current_rank().rank)

    @endpoint
    async def settle(self) -> None:
        """The start is over: what it left behind in this process stays."""
        settle_heap()

    @endpoint
    async def leave(self) -> None:
        """End this process and what it started, after the answer is out; skips the interpreter's slow exit."""
        threading.Timer(0.05, _leave).start()


def _leave() -> None:
    for pid in group_members(os.getpgid(0)) - {os.getpid()}:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def group_members(group: int) -> set[int]:
    """Pids of a process group (Monarch starts each process as the leader of its own)."""
    found = set()
    for entry in Path("/proc").iterdir() if Path("/proc/self").exists() else ():
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry.name)) == group:
                found.add(int(entry.name))
    return found


def _write_output_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)


class Procs:
    """A mesh of processes that this process started and will end."""

    running: set[Procs] = set()
    """All that this process has started and not ended."""

    def __init__(self, name: str, hosts: Hosts, mesh: ProcMesh, pulse: Any, gpus: tuple[int, ...] = ()) -> None:
        """`gpus`: those that were taken for it."""
        self.name = name
        self.safe_name = _safe(name)
        self.hosts = hosts
        self.mesh = mesh
        self.pulse = pulse
        self.processes: tuple[Process, ...] = ()
        self.watch: Watch | None = None
        self._gpus = gpus

    @classmethod
    async def start(
        cls,
        name: str,
        hosts: Hosts,
        *,
        procs: int,
        env: Mapping[str, str],
        timeout_s: float,
        gpus_each: int = 0,
        gpus: tuple[int, ...] = (),
        shared_gpus: tuple[int, ...] = (),
    ) -> Procs:
        """Start `procs` processes on each of `hosts`, and wait until all answer.

        Each process sees `gpus_each` of its host's GPUs, the lowest that no other mesh of this process holds, or one of
        those `gpus` that are given (this path has not been run on a machine with GPUs), and after its own the
        `shared_gpus`; otherwise it sees none.
        """
        taken = _take_gpus(hosts, procs * gpus_each) if gpus_each and not gpus else ()
        variables = {
            "OMP_NUM_THREADS": "1",
            "PYTHONFAULTHANDLER": "1",  # a crash of native code leaves the stacks of its threads in the log
            "PYTHONPATH": _import_path(),
            **hosts.env,
            **env,
        }
        visible = visible_gpus(gpus or taken, procs, shared_gpus)
        mesh = hosts.mesh.spawn_procs(
            per_host={PROCS: procs}, name=_safe(name), bootstrap_command=_bootstrap(variables, visible)
        )
        log_stem = str(Path(hosts.log_dir) / _safe(name)) if hosts.log_dir else ""
        self = cls(name, hosts, mesh, mesh.spawn("pulse", Pulse, log_stem), taken)
        Procs.running.add(self)
        try:
            beats = within(_call(self.pulse.beat), timeout_s, who=name, waits_for="its processes", from_whom=hosts.name)
            self.processes = tuple(sorted(await beats, key=lambda process: process.rank))
        except BaseException as error:
            await asyncio.shield(self.stop(timeout_s=1.0))
            if isinstance(error, Exception) and not isinstance(error, ForgeError):
                raise ActorDiedError(f"{name} did not start on {hosts.name}: {gist(error)}") from error
            raise
        for process in self.processes:
            for notify in on_start:
                notify(process)
        self.watch = Watch(name, self.processes, beat_of(self.pulse))
        return self

    async def settle(self, timeout_s: float) -> None:
        """Their start is over, whatever it loaded: the garbage collector need not walk that again and again."""
        assert self.watch is not None, "they have answered"
        answers = self.watch.guard(_call(self.pulse.settle))
        await within(answers, timeout_s, who=self.name, waits_for="its processes", from_whom=self.hosts.name)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End the processes: ask, wait, then kill what is left, by pid. Never raises for what is dead already."""
        Procs.running.discard(self)
        _give_back_gpus(self.hosts, self._gpus)
        if self.watch is not None:
            self.watch.close()
        leaving = (member(self.pulse, process.rank).leave.call_one() for process in self.processes if _may_run(process))
        await asyncio.gather(*(_quietly(answer, timeout_s / 4) for answer in leaving))
        await _until(lambda: not any(process.is_running() for process in self.processes), timeout_s / 2)
        for process in self.processes:
            _kill_group(process)
        await _quietly(self.mesh.stop(), timeout_s / 4)

    @staticmethod
    async def stop_all(timeout_s: float = 10.0) -> None:
        """End all that this process has started, together."""
        for notify in tuple(before_stop_all):
            notify()
        await asyncio.gather(*(procs.stop(timeout_s) for procs in tuple(Procs.running)))


def _safe(name: str) -> str:
    return re.sub(r"\W", "_", name)


def beat_of(pulse: Any) -> Beat:
    """How a watch asks the process of a rank for a sign of life."""

    async def beat(rank: int) -> Process:
        return await member(pulse, rank).beat.call_one()

    return beat


def member(mesh: Any, rank: int) -> Any:
    """The member of an actor mesh at a flat rank."""
    coordinates, sizes = {}, mesh._ndslice.sizes
    for label, size in zip(reversed(tuple(mesh._labels)), reversed(sizes), strict=True):
        rank, coordinates[label] = divmod(rank, size)
    return mesh.slice(**coordinates) if coordinates else mesh


async def _call(adverb: Any) -> list[Any]:
    """Call an endpoint of all members of a mesh and list the answers in rank order."""
    return [answer for _, answer in await adverb.call()]


def _import_path() -> str:
    """Where this process finds modules besides its installation, so that its actors' modules are found there too."""
    installed = tuple(os.path.join(prefix, "") for prefix in {sys.prefix, sys.base_prefix})  # noqa: PTH118
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path if not entry.startswith(installed))  # noqa: PTH109


def visible_gpus(gpus: tuple[int, ...], procs: int, shared: tuple[int, ...]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES says in each process of a host: its own GPUs first, then those that all share."""
    each = len(gpus) // procs
    own = [gpus[number * each : (number + 1) * each] for number in range(procs)]
    return [",".join(map(str, dict.fromkeys((*some, *shared)))) for some in own]


def _bootstrap(variables: Mapping[str, str], visible: Sequence[str]) -> Callable[[Any], BootstrapCommand]:
    base: Any = default_bootstrap_cmd()

    def command(point: Any) -> BootstrapCommand:
        env = {**base.env, "CUDA_VISIBLE_DEVICES": visible[point[PROCS]], **variables}
        return BootstrapCommand(base.program, base.arg0, base.args, env)

    return command


_gpus_in_use: dict[tuple[str, int], set[int]] = {}
"""GPU indices held by processes that this process started, by host mesh and host."""


def _gpu_sets(hosts: Hosts) -> list[set[int]]:
    return [_gpus_in_use.setdefault((hosts.name, hosts.first + index), set()) for index in range(hosts.num_hosts)]


def _take_gpus(hosts: Hosts, procs: int) -> tuple[int, ...]:
    in_use = _gpu_sets(hosts)
    taken = set[int]().union(*in_use)
    chosen = tuple(itertools.islice((index for index in itertools.count() if index not in taken), procs))
    if hosts.num_gpus is not None and chosen[-1] >= hosts.num_gpus:
        raise ConfigError(
            f"{procs} processes with a GPU each do not fit on {hosts.name}: it has {hosts.num_gpus} GPUs a host, "
            f"{len(taken)} of them in use; ask for fewer ranks or replicas, or raise job.gpus_per_host."
        )
    for host in in_use:
        host.update(chosen)
    return chosen


def _give_back_gpus(hosts: Hosts, gpus: tuple[int, ...]) -> None:
    for host in _gpu_sets(hosts):
        host.difference_update(gpus)


def _may_run(process: Process) -> bool:
    return process.is_running() or not process.is_local


def _kill_group(process: Process) -> None:
    """Kill one of our processes, and what it started and left in its process group."""
    if not process.is_local:
        return
    members = group_members(process.pid)
    process.send(signal.SIGKILL)
    for pid in members - {process.pid}:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition() and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _quietly(awaitable: Any, timeout_s: float) -> None:
    """Await something of a mesh that may be dead already, for a while; what it raises is of no interest."""

    async def wait() -> None:
        await awaitable

    with contextlib.suppress(Exception):
        await asyncio.wait_for(wait(), timeout_s)
