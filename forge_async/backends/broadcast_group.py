"""A process group for one sender and its audience, and the way of a blob through it in buckets.

The group is built directly and not through `init_process_group`: the process's default group belongs to torchtitan in
a learner and to vLLM in an engine. Its members find each other at a meeting point, a TCPStore of the store's process.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from forge_async.core.errors import WeightsError
from forge_async.weights.buckets import IN_FLIGHT, buckets, carry

BUCKET_BYTES = 8 << 20
"""Large enough that the constant cost of a collective does not count, small enough that two in flight overlap."""
CONNECT_S = 20.0
"""How long a process may take to reach the meeting point."""
POLL_S = 0.001
"""Between looks at a collective that can only be asked whether it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where senders and their audience find each other."""

    host: str
    port: int

    def connect(self) -> dist.TCPStore:
        """A connection of its own: one that waits keeps no other from being used. Raises WeightsError."""
        try:
            self.own_address()  # refused at once, where a TCPStore would try for a while
            return _store(self.host, self.port)
        except (OSError, dist.DistError) as error:
            raise WeightsError(
                f"The weight store's meeting point at {self.host}:{self.port} does not answer; it has ended, or "
                "weights.broadcast_host is not an address by which this host reaches it."
            ) from error

    def own_address(self) -> str:
        """The address of this host on the way to the meeting point; others of the group reach it there."""
        with socket.create_connection((self.host, self.port), CONNECT_S) as connection:
            return connection.getsockname()[0]


class MeetingPoint:
    """The server's side: in the store's process, on one address and a port that the system chooses."""

    def __init__(self, host: str) -> None:
        """`host`: the address to listen on. Raises WeightsError when it is none of this host."""
        try:
            with socket.create_server((host, 0)) as listening:
                port = listening.getsockname()[1]
                self._server = _store(host, port, listen_on=listening.detach())
        except OSError as error:
            raise WeightsError(
                f"weights.broadcast_host={host} cannot be listened on ({error}); give an address of the store's host."
            ) from error
        self.meeting = Meeting(host=host, port=port)

    def close(self) -> None:
        """End it. Whoever still waits there gets an error."""
        self._server = None


def _store(host: str, port: int, listen_on: int | None = None) -> dist.TCPStore:
    return dist.TCPStore(
        host,
        port,
        is_master=listen_on is not None,
        timeout=timedelta(seconds=CONNECT_S),
        wait_for_workers=False,
        master_listen_fd=listen_on,
    )


class Wire(Protocol):
    """A group as one of its members sees it."""

    def start(self, bucket: torch.Tensor) -> Callable[[], None]:
        """Set off the broadcast of a bucket, uint8 [bytes] on the CPU, and return what waits for its end.

        The root's bucket is sent, the others' is filled. Raises RuntimeError, as the wait does.
        """
        ...

    def close(self) -> None:
        """Leave the group, which ends it for the others too."""
        ...


def join_group(backend: str, meeting: Meeting, name: str, rank: int, size: int, timeout_s: float) -> Wire:
    """Form a group with the others who call this, rank 0 being the sender. Raises RuntimeError when one is missing.

    Args:
        backend: `gloo` or `nccl`.
        name: the same for all of its members, and never used before.
        rank: of this process.
        size: of the group.
        timeout_s: how long forming may take, and each bucket.
    """
    store = dist.PrefixStore(name, meeting.connect())
    store.set_timeout(timedelta(seconds=timeout_s))
    return WIRES[backend](store, meeting.own_address(), rank, size, timeout_s)


class GlooWire:
    """Over sockets. The root's buckets are sent from where they lie, and the others' arrive where they belong."""

    def __init__(self, store: dist.Store, address: str, rank: int, size: int, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address)]
        options._timeout, options._threads = timedelta(seconds=timeout_s), IN_FLIGHT
        self._group: Any = gloo(store, rank, size, options)
        self._options = _from_root(timeout_s)

    def start(self, bucket: torch.Tensor) -> Callable[[], None]:
        return self._group.broadcast([bucket], self._options).wait

    def close(self) -> None:
        self._group = None  # its end waits for the buckets under way: nobody touches their memory from then on


class NcclWire:
    """Between GPUs, by way of two buffers on this process's own: one is filled while the other travels.

    Written for machines with GPUs and not run on one.
    """

    def __init__(self, store: dist.Store, address: str, rank: int, size: int, timeout_s: float) -> None:
        """NCCL chooses its own addresses."""
        group: Any = getattr(dist, "ProcessGroupNCCL", None)
        if group is None or not torch.cuda.is_available():
            raise WeightsError("weights.broadcast_backend=nccl needs a GPU and NCCL in every process that takes part.")
        options = group.Options()
        options._timeout = timedelta(seconds=100 * timeout_s)  # its watchdog would end the process: ours comes first
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._group, self._is_root, self._timeout_s = group(store, rank, size, options), rank == 0, timeout_s
        self._buffers = [torch.empty(BUCKET_BYTES, dtype=torch.uint8, device=self._device) for _ in range(IN_FLIGHT)]

    def start(self, bucket: torch.Tensor) -> Callable[[], None]:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        travelling = buffer[: bucket.numel()]
        if self._is_root:
            travelling.copy_(bucket)
        work = self._group.broadcast([travelling], _from_root(self._timeout_s))
        return lambda: self._finish(work, bucket, travelling)

    def _finish(self, work: Any, bucket: torch.Tensor, travelling: torch.Tensor) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError(f"a bucket was not taken within {self._timeout_s:g} s")
            time.sleep(POLL_S)
        work.wait()
        if not self._is_root:
            bucket.copy_(travelling)

    def close(self) -> None:
        self._group.abort()


WIRES: dict[str, Callable[[dist.Store, str, int, int, float], Wire]] = {"gloo": GlooWire, "nccl": NcclWire}
"""By `weights.broadcast_backend`."""


def _from_root(timeout_s: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.timeout, options.asyncOp = timedelta(seconds=timeout_s), True
    return options


def broadcast(wire: Wire, blob: torch.Tensor, total_s: float, moved: Callable[[], None] = lambda: None) -> None:
    """Send a blob, or fill it, as one member of a group in which all do this at once.

    Args:
        wire: the group.
        blob: uint8 [bytes], as long for all of them.
        total_s: how long it may take.
        moved: called after each bucket.

    Raises RuntimeError when a member dies or stalls, or the time is over: the group is then of no use any more.
    """
    deadline = time.monotonic() + total_s

    def start(bucket: slice) -> Callable[[], None]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the broadcast of {blob.numel()} bytes took more than {total_s:g} s")
        wait = wire.start(blob[bucket])

        def finish() -> None:
            wait()
            moved()

        return finish

    carry(buckets(blob.numel(), BUCKET_BYTES), start)


def leave(wire: Wire | None) -> None:
    """Close a wire that may be broken already."""
    if wire is not None:
        with suppress(RuntimeError):
            wire.close()
