"""ForgeActor and services, and the Monarch shells around rooms and backends.

For those who write their own: `from forge_async.actors import ForgeActor, endpoint, concurrent_endpoint`, and the
shipped actors beside them. docs/public_api.md says how to use them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_async.actors.forge_actor import ActorHandle, ForgeActor, Hosts, concurrent_endpoint, endpoint
    from forge_async.actors.kept_store import KeptStore
    from forge_async.actors.learner_actor import LearnerActor, LearnerPlan
    from forge_async.actors.policy_actor import PolicyActor
    from forge_async.actors.reference_actor import ReferenceActor, ReferencePlan
    from forge_async.actors.remote import RemoteError
    from forge_async.actors.replay_actor import ReplayActor
    from forge_async.actors.service import Service, Session
    from forge_async.actors.store_actor import StoreActor

__all__ = [
    "ActorHandle",
    "ForgeActor",
    "Hosts",
    "KeptStore",
    "LearnerActor",
    "LearnerPlan",
    "PolicyActor",
    "ReferenceActor",
    "ReferencePlan",
    "RemoteError",
    "ReplayActor",
    "Service",
    "Session",
    "StoreActor",
    "concurrent_endpoint",
    "endpoint",
]

_MODULES = {
    "KeptStore": "kept_store",
    "LearnerActor": "learner_actor",
    "LearnerPlan": "learner_actor",
    "PolicyActor": "policy_actor",
    "ReferenceActor": "reference_actor",
    "ReferencePlan": "reference_actor",
    "ReplayActor": "replay_actor",
    "Service": "service",
    "Session": "service",
    "StoreActor": "store_actor",
}
"""Where the names are; the others are in forge_actor."""


def __getattr__(name: str) -> Any:
    """Import Monarch only when one of the names is used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES.get(name, 'forge_actor')}"), name)
