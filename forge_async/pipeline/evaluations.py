"""Evaluations during a run: beside the loops, one after the other, each stamped with the versions that answered."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge_async.pipeline.ports import Replica, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What an evaluation found."""

    step: int
    """Learner steps done when it was asked for."""
    oldest_version: int
    """Step of the oldest version that made a token of the answers."""
    newest_version: int
    """Step of the newest one; swaps go on during an evaluation beside the loops."""
    score: float
    """Mean score over the held-out prompts, greedy."""


class Evaluations:
    """Has held-out prompts answered while the loops go on."""

    def __init__(
        self,
        workers: Workers,
        replicas: Sequence[Replica],
        *,
        num_prompts: int,
        observe: Callable[[Evaluated], None],
    ) -> None:
        """`observe` is told of each that ends; with `num_prompts` of 0 there are none."""
        self._workers, self._num_prompts, self._observe = workers, num_prompts, observe
        self._replicas = itertools.cycle(replicas)
        self._turn = asyncio.Lock()
        self._running: set[asyncio.Task[Evaluated | None]] = set()

    async def evaluate(self, step: int) -> Evaluated | None:
        """Evaluate what is served now and wait for it; None when there are no held-out prompts."""
        if not self._num_prompts:
            return None
        async with self._turn:
            replica = next(self._replicas).name
            score, steps = await self._workers.evaluate(self._num_prompts, replica, f"eval {step}")
        if math.isnan(score):
            return None
        found = Evaluated(step=step, oldest_version=steps[0], newest_version=steps[-1], score=score)
        self._observe(found)
        return found

    def begin(self, group: asyncio.TaskGroup, step: int) -> None:
        """Evaluate beside what the group does; a failure ends the group."""
        task = group.create_task(self.evaluate(step), name=f"evaluate after step {step}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for those that are still on their way."""
        if self._running:
            await asyncio.wait(self._running)
