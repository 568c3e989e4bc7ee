"""Where a run's processes live: host meshes by role, their environment, and the end of them all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from forge_async.actors.liveness import Process
from forge_async.actors.procs import Hosts, Procs, on_start  # first: it prepares Monarch's environment
from forge_async.config.job import JobSettings
from forge_async.core.clock import within
from forge_async.runtime import jobs
from forge_async.runtime.guardian import Guardian

# isort: split
from monarch.actor import HostMesh, shutdown_context, this_host

LONGEST_TMP = 60
"""Bytes of a temporary folder's path under which sockets still get names that the kernel accepts (107 bytes)."""

SHORT_TMP = Path(os.sep) / "tmp"
"""Where temporary files go when the path that TMPDIR gives is too long; POSIX has this folder everywhere."""


class Placement:
    """The hosts of a run: `learner`, `policy`, `reference`, and `controller` for what runs beside the controller.

    Children's temporary files (vLLM's, Monarch's) go to a folder of the run, which is removed at the end. A guardian
    process ends everything if this process is killed.
    """

    def __init__(self, job: JobSettings, run_dir: Path) -> None:
        self.job = job
        self.run_dir = run_dir.resolve()
        self.tmp = _temporary_folder(self.run_dir)
        self.guardian = Guardian()
        self._monarch_job: Any = None
        self._meshes: dict[str, HostMesh] = {}
        self._stopped = False
        self._own_tmpdir = os.environ.get("TMPDIR")

    @classmethod
    async def start(cls, job: JobSettings, run_dir: str | Path, *, timeout_s: float = 120.0) -> Placement:
        """Start what `job.kind` asks for and attach to its hosts."""
        jobs.check(job)
        self = cls(job, Path(run_dir))
        try:
            await self._start(timeout_s)
        except BaseException:
            await self.stop()
            raise
        return self

    async def _start(self, timeout_s: float) -> None:
        if not _is_short(Path(tempfile.gettempdir())):
            self._redirect_tmp(
                str(SHORT_TMP)
            )  # Monarch's sockets outlive this placement, so they are not in its folder
        _start_monarch(self.run_dir / "logs")
        self.guardian.add_path(self.tmp)
        on_start.append(self._guard)
        self._redirect_tmp(str(self.tmp))
        if self.job.kind == "local":
            return
        self._monarch_job = jobs.build(self.job, log_dir=str(self.run_dir / "logs"))
        state = self._monarch_job.state(cached_path=None)
        self._guard_hosts()
        for role in jobs.roles(self.job):
            mesh = self._meshes[role] = getattr(state, jobs.mesh_name(self.job, role))
            await within(
                _initialized(mesh), timeout_s, who="The run", waits_for=f"the {role} hosts", from_whom=self.job.kind
            )

    @property
    def learner(self) -> Hosts:
        """Hosts of the learner's ranks."""
        return self._hosts("learner")

    @property
    def policy(self) -> Hosts:
        """Hosts of the policy's replicas."""
        return self._hosts("policy")

    @property
    def reference(self) -> Hosts:
        """Hosts of the reference service, if there is one: its own, or the first of the learner's."""
        return self._hosts(jobs.REFERENCE) if jobs.REFERENCE in self._meshes else self.learner.one(0)

    @property
    def controller(self) -> Hosts:
        """This host: replay, rollout workers, store."""
        return self._hosts("this host")

    def _hosts(self, role: str) -> Hosts:
        mesh = self._meshes.get(role)
        return Hosts(
            mesh=this_host() if mesh is None else mesh,
            name="this host" if mesh is None else role,
            env={"TMPDIR": str(self.tmp)},
            log_dir=str(self.run_dir / "logs"),
            num_gpus=self.job.gpus_per_host,
        )

    async def stop(self, timeout_s: float = 10.0) -> None:
        """End every process of the run: ask first, kill what is left, remove temporary files. May be called again."""
        if self._stopped:
            return
        self._stopped = True
        await Procs.stop_all(timeout_s * 0.6)
        for mesh in self._meshes.values():
            with contextlib.suppress(Exception):
                await asyncio.wait_for(_shut(mesh), timeout_s * 0.1)
        if self._monarch_job is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.to_thread(self._monarch_job.kill), timeout_s * 0.2)
        with contextlib.suppress(ValueError):
            on_start.remove(self._guard)
        self._redirect_tmp(self._own_tmpdir)
        shutil.rmtree(self.tmp, ignore_errors=True)
        await asyncio.to_thread(self.guardian.dismiss)

    async def __aenter__(self) -> Placement:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _guard(self, process: Process) -> None:
        if process.is_local:
            self.guardian.add_process(process.pid, started=process.started)

    def _guard_hosts(self) -> None:
        """Monarch starts the hosts of a ProcessJob in sessions of their own; they would outlive us."""
        for host in getattr(self._monarch_job, "_host_to_pid", {}).values():
            self.guardian.add_process(host.pid, session=True)

    def _redirect_tmp(self, folder: str | None) -> None:
        """Send temporary files of this process, Monarch's among them, to a folder; None: where the system says."""
        if folder is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = folder
        tempfile.tempdir = None  # so that it is looked up anew


def _start_monarch(log_dir: Path) -> None:
    """Start Monarch's client in this process; the line that it prints about its own log goes to the controller's."""
    log_dir.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with (log_dir / "controller.log").open("ab") as log:
            os.dup2(log.fileno(), 2)
        this_host()
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _temporary_folder(run_dir: Path) -> Path:
    """A folder for sockets and the like: inside the run's when its path is short enough, else the system's."""
    inside = run_dir / "tmp"
    if len(os.fsencode(inside)) <= LONGEST_TMP:
        inside.mkdir(parents=True, exist_ok=True)
        return inside
    return Path(tempfile.mkdtemp(prefix="forge-", dir=None if _is_short(Path(tempfile.gettempdir())) else SHORT_TMP))


def _is_short(tmp: Path) -> bool:
    """May a folder made in this one hold sockets?"""
    return len(os.fsencode(tmp)) + len("/forge-12345678") <= LONGEST_TMP


async def _initialized(mesh: HostMesh) -> None:
    await mesh.initialized


async def _shut(mesh: HostMesh) -> None:
    await mesh.shutdown()


async def close_monarch(timeout_s: float = 2.0) -> None:
    """Shut this process's Monarch client down for good; for the end of a program, after `Placement.stop`."""

    async def close() -> None:
        await shutdown_context(host_timeout=0.5)

    with contextlib.suppress(Exception):
        await asyncio.wait_for(close(), timeout_s)
