"""The transports, what each can do, and which one `auto` takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge_async.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """A way for shards to travel, as it declares itself."""

    name: str
    """As `weights.transport`."""
    late_joiners: bool
    """Whether a replica that starts later can read any version that is still kept."""
    survives_members: bool
    """Whether the others go on when a learner rank or a replica dies in the middle of a transfer."""
    cross_host: bool
    """Whether reader and writer may be on different hosts."""
    is_shared: bool
    """Whether readers use the store's own memory, and so hold nothing of their own."""
    lends_memory: bool = False
    """Whether a writer that fills memory of the store saves a copy."""

    def suits(self, *, same_host: bool) -> bool:
        """Whether a run may rely on it between the store and a client: replicas are started anew, and members die."""
        return self.late_joiners and self.survives_members and (same_host or self.cross_host)


SHM = Transport(
    name="shm", late_joiners=True, survives_members=True, cross_host=False, is_shared=True, lends_memory=True
)
IPC = Transport(
    name="ipc", late_joiners=True, survives_members=True, cross_host=False, is_shared=True, lends_memory=True
)
RDMA = Transport(
    name="rdma", late_joiners=True, survives_members=True, cross_host=True, is_shared=False, lends_memory=True
)
RPC = Transport(name="rpc", late_joiners=True, survives_members=True, cross_host=True, is_shared=False)
FILESYSTEM = Transport(name="filesystem", late_joiners=True, survives_members=True, cross_host=True, is_shared=False)
HTTP = Transport(name="http", late_joiners=True, survives_members=True, cross_host=True, is_shared=False)
BROADCAST = Transport(
    name="broadcast", late_joiners=True, survives_members=True, cross_host=True, is_shared=False, lends_memory=True
)
"""Of the process group alone neither of the first two would hold: who joins late, or whose group broke, pulls the same
version over `shm` or `rpc`."""
BUILT = {each.name: each for each in (SHM, IPC, RDMA, RPC, FILESYSTEM, HTTP, BROADCAST)}
"""The transports that there are, by name."""


AUTO = (SHM, RPC)
"""What `auto` takes the first suitable of: the fastest comes first. One store serves all of them. Broadcast is not
among them: on one host shared memory is faster (`bench weights`), and over several hosts nobody has measured it. Nor
are `rdma` and `ipc`: they have not run on the hardware that they are for."""


def choose(requested: str, *, same_host: bool, among: Sequence[Transport] = AUTO) -> Transport:
    """The transport between the store and one of its clients, by what each says of itself.

    `auto` takes the first of `among` that suits. A client that asks for shared memory from another host gets messages
    too: the store serves both. What `broadcast` is pulled over, when it is, is what `auto` would take.

    Raises ConfigError for a transport that does not reach a client on another host.
    """
    wanted = among if requested in ("auto", "shm", "broadcast") else (BUILT[requested],)
    for each in wanted:
        if each.suits(same_host=same_host):
            return each
    raise ConfigError(
        f"weights.transport={requested} does not leave the store's host, and this process is on another; "
        "use weights.transport=auto."
    )
