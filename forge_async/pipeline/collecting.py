"""The results of a submission as they come, until its deadline; what is unfinished then is cut off."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence

from forge_async.core.clock import within
from forge_async.pipeline.ports import PolicyClient
from forge_async.policy.ports import GenerationRequest, GenerationResult

CUT_TIMEOUT_S = 30.0
"""How long a policy may take to cut requests off: some engine steps."""


def new_ticket() -> str:
    """A name for a submission that no other has, whoever else submits to the same policy."""
    return uuid.uuid4().hex


async def collected(
    policy: PolicyClient, requests: Sequence[GenerationRequest], *, linger_s: float, timeout_s: float
) -> AsyncGenerator[list[GenerationResult], None]:
    """Submit requests together, and yield results in the batches in which they come. After `timeout_s` seconds the last
    batch has the rest: finished rows whole, the others as far as they came and marked as cut.

    Raises RequestRefusedError, after all other results, when the engine refused some requests, and StallError when
    the policy does not even answer to the cut.
    """
    loop = asyncio.get_running_loop()
    deadline_s, ticket, is_given, done = loop.time() + timeout_s, new_ticket(), False, False
    while not done:
        call = policy.collect(ticket, linger_s) if is_given else policy.submit(ticket, requests, linger_s)
        collecting, is_given = asyncio.ensure_future(call), True
        try:
            # Not cancelled when time is up: what a cancelled call had already fetched would be lost.
            await asyncio.wait({collecting}, timeout=max(0.0, deadline_s - loop.time()))
            if collecting.done():
                results, done = collecting.result()
            else:
                results, done = await _cut(policy, ticket, collecting), True
        finally:
            collecting.cancel()
        if results:
            yield results


async def _cut(
    policy: PolicyClient, ticket: str, collecting: asyncio.Future[tuple[list[GenerationResult], bool]]
) -> list[GenerationResult]:
    async def both() -> list[GenerationResult]:
        cut = await policy.cut(ticket)
        late, _ = await collecting
        return late + cut

    return await within(
        both(),
        CUT_TIMEOUT_S,
        who="The rollout worker",
        waits_for="overdue rollouts to be cut off",
        from_whom="the policy",
    )
