"""A request service of this process, from the side of whoever wants tokens."""

from __future__ import annotations

from collections.abc import Sequence

from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.policy.service import RequestService, Ticket


class LocalPolicy:
    """What a policy replica's actor is to its callers (`pipeline.ports.PolicyClient`), without an actor."""

    def __init__(self, service: RequestService) -> None:
        self._service, self._tickets = service, list[Ticket]()

    async def submit(self, requests: Sequence[GenerationRequest]) -> int:
        """Queue requests together; returns a ticket to collect them with."""
        self._tickets.append(self._service.submit(requests))
        return len(self._tickets) - 1

    async def collect(self, ticket: int, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Finished requests of the ticket, and whether none is left."""
        return await self._service.collect(self._tickets[ticket], linger_s)

    async def cut(self, ticket: int) -> list[GenerationResult]:
        """End what is unfinished now; returns what was not collected."""
        return await self._service.cut(self._tickets[ticket])
