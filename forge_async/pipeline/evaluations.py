"""Evaluations during a run: beside the loops, one after the other, each stamped with the versions that answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forge_async.pipeline.ports import EvalScores, Replica, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What an evaluation found."""

    step: int
    """Learner steps done when it was asked for. The versions that answered may lie around it, since swaps go on during
    an evaluation beside the loops, and a replica may not have pulled this one when it begins."""
    scores: EvalScores

    @property
    def score(self) -> float:
        """Mean score of the greedy answers."""
        return self.scores.greedy.mean

    def record(self) -> dict[str, Any]:
        """What the run's summary says of it."""
        scores, greedy = self.scores, self.scores.greedy
        known = {"step": self.step, "score": greedy.mean, "low": greedy.low, "high": greedy.high}
        known |= {"oldest_version": scores.oldest_version, "newest_version": scores.newest_version}
        known |= {"num_prompts": scores.num_prompts, "num_samples": scores.num_samples}
        if scores.sampled is not None:
            known["sampled"] = asdict(scores.sampled)
        return known | {f"pass_at_{each.k}": asdict(each.estimate) for each in scores.pass_at}


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
        self._running: dict[asyncio.Task[Evaluated | None], int] = {}

    async def evaluate(self, step: int) -> Evaluated | None:
        """Evaluate what is served now and wait for it; None when there are no held-out prompts."""
        if not self._num_prompts:
            return None
        async with self._turn:
            replica = next(self._replicas).name
            scores = await self._workers.evaluate(self._num_prompts, replica, f"eval {step}")
        if scores is None:
            return None
        found = Evaluated(step=step, scores=scores)
        self._observe(found)
        return found

    def begin(self, group: asyncio.TaskGroup, step: int) -> None:
        """Evaluate beside what the group does; a failure ends the group."""
        task = group.create_task(self.evaluate(step), name=f"evaluate after step {step}")
        self._running[task] = step
        task.add_done_callback(self._running.pop)

    @property
    def running_steps(self) -> set[int]:
        """After which steps those were begun that are still on their way."""
        return set(self._running.values())

    async def finish(self) -> None:
        """Wait for those that are still on their way."""
        if self._running:
            await asyncio.wait(self._running)
