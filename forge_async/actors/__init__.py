"""ForgeActor and services, and the Monarch shells around rooms and backends.

For those who write their own: `from forge_async.actors import ForgeActor, endpoint, concurrent_endpoint`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_async.actors.forge_actor import ActorHandle, ForgeActor, Hosts, concurrent_endpoint, endpoint
    from forge_async.actors.remote import RemoteError
    from forge_async.actors.service import Service, Session

__all__ = [
    "ActorHandle",
    "ForgeActor",
    "Hosts",
    "RemoteError",
    "Service",
    "Session",
    "concurrent_endpoint",
    "endpoint",
]


def __getattr__(name: str) -> Any:
    """Import Monarch only when one of the names is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from forge_async.actors import forge_actor, service

    return getattr(service if name in ("Service", "Session") else forge_actor, name)
