"""A request service by tickets, from the side of whoever wants tokens."""

from __future__ import annotations

from collections.abc import Sequence

from forge_async.core.errors import ForgeError, PolicyError
from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.policy.service import RequestService, Ticket

MAX_EARLY = 1000
"""Cuts of unknown tickets that are kept in mind: one that overtakes its submission does so by moments."""


class LocalPolicy:
    """What a policy replica's actor is to its callers (`pipeline.ports.PolicyClient`), without an actor."""

    def __init__(self, service: RequestService, name: str = "The policy") -> None:
        self._service, self._name = service, name
        self._tickets: dict[str, Ticket] = {}
        self._cut_early: dict[str, Sequence[str] | None] = {}
        """Unknown tickets that were to be cut, oldest first, and which requests of each."""

    async def submit(
        self, ticket: str, requests: Sequence[GenerationRequest], linger_s: float
    ) -> tuple[list[GenerationResult], bool]:
        """Queue requests that belong together, and `collect` the first that finish.

        Args:
            ticket: what its sender calls the submission from here on, unlike any other.
            requests: in the order in which they enter the engine.
            linger_s: as of `collect`.

        A submission that was to be cut before it arrived is cut at once: nothing of it enters the engine.
        """
        if ticket in self._tickets:
            raise PolicyError(f"{self._name} has a ticket {ticket} already; give each submission one of its own.")
        self._tickets[ticket] = self._service.submit(requests)
        if ticket not in self._cut_early:
            return await self.collect(ticket, linger_s)
        ids = self._cut_early.pop(ticket)
        return await self.cut(ticket, ids), ids is None

    async def collect(self, ticket: str, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Finished requests of a ticket (one, and more that come within `linger_s`), and whether none is left."""
        if ticket not in self._tickets:
            raise PolicyError(f"{self._name} knows no ticket {ticket}: it was collected to its end, or never given.")
        try:
            results, done = await self._service.collect(self._tickets[ticket], linger_s)
        except ForgeError:
            self._tickets.pop(ticket, None)
            raise
        if done:
            self._tickets.pop(ticket, None)
        return results, done

    async def cut(self, ticket: str, ids: Sequence[str] | None = None) -> list[GenerationResult]:
        """End the unfinished requests of a ticket now, or those of `ids`; returns what was not yet collected of them.

        Finished rows are whole, unfinished ones as far as they came and marked as cut; a request that carries such a
        result as its prefix goes on from there, on any replica. A `collect` that still waits returns without them.
        Nothing is left of a ticket that was collected to its end. One that was never given may be on its way: what
        gives it then returns what is cut.
        """
        if ticket not in self._tickets:
            before = self._cut_early.get(ticket, ())  # None, of all requests, stays so
            self._cut_early[ticket] = None if ids is None or before is None else [*before, *ids]
            if len(self._cut_early) > MAX_EARLY:
                del self._cut_early[next(iter(self._cut_early))]
            return []
        results = await self._service.cut(self._tickets[ticket], ids)
        if ids is None:
            self._tickets.pop(ticket, None)
        return results
