"""A policy replica whose engine sleeps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_async.backends.simulated.engine import Rollout, Run, SimulatedEngine
from forge_async.backends.simulated.times import EngineTimes, LengthsOf
from forge_async.core.clock import Clock
from forge_async.core.errors import PolicyError
from forge_async.core.records import Completions
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.pipeline.ports import Pull, ReplicaStats
from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.policy.service import ServiceStats

TOKEN = 3
"""The one word that simulated policies know."""


@dataclass(slots=True, kw_only=True)
class _Ticket:
    remaining: int
    rollouts: list[Rollout] = field(default_factory=list)
    finished: list[GenerationResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class SimulatedReplica:
    """Implements `Replica` and `PolicyClient`."""

    def __init__(
        self,
        name: str,
        *,
        times: EngineTimes,
        lengths_of: LengthsOf,
        swap: str,
        clock: Clock,
        version: PolicyVersion | None = None,
    ) -> None:
        """`swap`: as `async.swap`."""
        self.name = name
        self.engine = SimulatedEngine(times, clock, version or PolicyVersion())
        self._times, self._lengths_of, self._swap, self._clock = times, lengths_of, swap, clock
        self._tickets: dict[str, _Ticket] = {}
        self._serving: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._asked = (0.0, 0)

    async def start(self) -> None:
        """Begin to serve."""
        self._serving = asyncio.create_task(self.engine.serve(), name=f"engine of {self.name}")
        self._serving.add_done_callback(self._ended)

    async def close(self) -> None:
        """Serve no more: what is in flight is lost, and whoever waits for it waits for ever."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def submit(
        self, ticket: str, requests: Sequence[GenerationRequest], linger_s: float
    ) -> tuple[list[GenerationResult], bool]:
        mine = self._tickets[ticket] = _Ticket(remaining=len(requests))
        for request in requests:
            self._add(request, mine)
        return await self.collect(ticket, linger_s)

    async def collect(self, ticket: str, linger_s: float) -> tuple[list[GenerationResult], bool]:
        if ticket not in self._tickets:
            raise PolicyError(f"{self.name} knows no ticket {ticket}: it was collected to its end, or never given.")
        mine = self._tickets[ticket]
        while not mine.finished and mine.remaining:
            mine.changed.clear()
            await mine.changed.wait()
            if self._error is not None:
                raise self._error
        if mine.remaining and linger_s > 0:
            await self._clock.sleep(linger_s)
        results, mine.finished = mine.finished, []
        if not mine.remaining:
            self._tickets.pop(ticket, None)
        return results, not mine.remaining

    async def cut(self, ticket: str) -> list[GenerationResult]:
        if ticket not in self._tickets:
            return []
        mine = self._tickets.pop(ticket)
        self.engine.cut(mine.rollouts)
        results, mine.finished = mine.finished, []
        return results

    async def pull(self, version: PolicyVersion) -> Pull:
        started_s, before_s = self._clock.now_s(), self.engine.cost.pause_s
        await self.engine.swap(version, self._swap, self._times.fetch_s)
        return Pull(
            version=version,
            fetch_s=self._times.fetch_s,
            pause_s=self.engine.cost.pause_s - before_s,
            num_bytes=0,
            held_bytes=0,
            started_s=started_s,
        )

    async def stats(self) -> ReplicaStats:
        before, self._asked = self._asked, (self.engine.busy_s, self.engine.made_tokens)
        service = ServiceStats(busy_s=self._asked[0] - before[0], tokens=self._asked[1] - before[1])
        return ReplicaStats(service=service, kv_usage=self.engine.fill(), rss_bytes=0, cpu_s=0.0)

    async def score(self, token_ids: np.ndarray) -> tuple[PolicyVersion, np.ndarray]:
        return self.engine.version, np.zeros(len(token_ids) - 1, dtype=np.float32)

    def _ended(self, serving: asyncio.Task[None]) -> None:
        """Have those who wait hear of an engine that failed."""
        if not serving.cancelled() and (error := serving.exception()):
            self._error = error
            for ticket in self._tickets.values():
                ticket.changed.set()

    def _add(self, request: GenerationRequest, ticket: _Ticket) -> None:
        lengths = self._lengths_of(request)
        runs: list[list[Run] | None] = [None] * len(lengths)

        def done(number: int, of_rollout: list[Run]) -> None:
            runs[number] = of_rollout
            made = [each for each in runs if each is not None]
            if len(made) < len(runs):
                return
            ticket.remaining -= 1
            completions = _completions(lengths, made, request.sampling.max_new_tokens)
            ticket.finished.append(GenerationResult(id=request.id, completions=completions))
            ticket.changed.set()

        for number, length in enumerate(lengths.tolist()):
            rollout = Rollout(
                num_prompt_tokens=len(request.prompt_token_ids),
                length_tokens=length,
                done=lambda of_rollout, number=number: done(number, of_rollout),
            )
            ticket.rollouts.append(rollout)
            self.engine.add(rollout)


def _completions(wanted: np.ndarray, runs: Sequence[Sequence[Run]], max_new_tokens: int) -> Completions:
    """Completions of so many tokens each, or of fewer where they were cut off."""
    lengths = np.array([sum(run[0] for run in of_rollout) for of_rollout in runs], dtype=np.int32)
    total, cut = int(lengths.sum()), lengths < wanted
    return Completions(
        lengths=lengths,
        token_ids=np.full(total, TOKEN, dtype=np.int32),
        logprobs=np.full(total, -1.0, dtype=np.float32),
        versions=VersionRuns.of(run for of_rollout in runs for run in of_rollout),
        truncated=(lengths >= max_new_tokens) & ~cut,
        cut=cut,
    )
