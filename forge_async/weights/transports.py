"""The transports, what each can do, and which one `auto` takes."""

from __future__ import annotations

from dataclasses import dataclass


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
    medium: str
    """Where the bytes are in between, in a few words."""


SHM = Transport(
    name="shm",
    late_joiners=True,
    survives_members=True,
    cross_host=False,
    is_shared=True,
    medium="memory segments of the store's process, mapped by its clients",
)
RPC = Transport(
    name="rpc",
    late_joiners=True,
    survives_members=True,
    cross_host=True,
    is_shared=False,
    medium="messages of Monarch to and from torchstore's volume",
)
FILESYSTEM = Transport(
    name="filesystem",
    late_joiners=True,
    survives_members=True,
    cross_host=True,
    is_shared=False,
    medium="safetensors files in a folder that all hosts share",
)
HTTP = Transport(
    name="http",
    late_joiners=True,
    survives_members=True,
    cross_host=True,
    is_shared=False,
    medium="requests to the store's process, opened by a token",
)
BUILT = {each.name: each for each in (SHM, RPC, FILESYSTEM, HTTP)}
"""The transports that there are, by name."""


def choose(requested: str, *, same_host: bool) -> Transport:
    """The transport between the store and one of its clients.

    `auto` takes shared memory where the client runs on the store's host, and messages elsewhere. A client that asks
    for shared memory from another host gets messages too: the store serves both.
    """
    if requested in ("auto", "shm") and same_host:
        return SHM
    return RPC
