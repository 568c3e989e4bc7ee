"""A pool of worker processes that run reward functions, so that a bad function can only harm its own call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from forge_async.core.errors import RewardError
from forge_async.core.user_code import absolute_reference, check_reference
from forge_async.reward.ports import RewardCall, RewardOutcome
from forge_async.reward.worker import RewardWorker, WorkerSettings

MAX_BATCH = 128
"""Most calls that travel to a worker in one message."""
MIN_BATCH = 8
"""Fewer travel only when there are not enough for all workers."""


class ProcessRewardPool:
    """RewardPool over worker processes. Several `score` calls may run at once; they share the workers.

    Processes are started anew, never forked (a process with threads cannot be forked safely), live in a process
    group of their own, and die with their parent: with the thread that called `start`, to be exact, so call it from
    the thread of a lasting event loop.

    Args:
        reference: `package.module:function` or `file.py:function`, or a built-in task's own function.
        num_workers: processes.
        timeout_s: longest time one call may take, in seconds.
        slack_s: added to it before a silent worker is killed, in seconds.
        startup_timeout_s: longest time for a worker to load the function, in seconds.
    """

    def __init__(
        self,
        reference: str,
        *,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        slack_s: float = 0.5,
        startup_timeout_s: float = 120.0,
    ) -> None:
        check_reference(reference, "reward")
        settings = WorkerSettings(
            reference=absolute_reference(reference),
            timeout_s=timeout_s,
            slack_s=slack_s,
            startup_timeout_s=startup_timeout_s,
        )
        self._workers = [RewardWorker(settings) for _ in range(num_workers)]
        self._idle: asyncio.Queue[RewardWorker] = asyncio.Queue()
        self._closed = False
        for worker in self._workers:
            self._idle.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.pid for worker in self._workers if worker.pid is not None]

    async def start(self) -> None:
        """Start all workers. Raises ConfigError when the function cannot be loaded, StallError when it does not end."""
        results = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
        if failed := [result for result in results if isinstance(result, BaseException)]:
            await self.close()
            raise failed[0]

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        """Return one outcome for each call, in order. See RewardPool."""
        job = _Job(calls, len(self._workers))
        drains = [asyncio.create_task(self._drain(job)) for _ in self._workers[: len(calls)]]
        try:
            await asyncio.gather(*drains)
        finally:
            for drain in drains:
                drain.cancel()
            await asyncio.gather(*drains, return_exceptions=True)
        return job.outcomes()

    async def close(self) -> None:
        """End every worker; calls in progress fail. May be called twice."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _drain(self, job: _Job) -> None:
        """Score batches of the job, on whichever worker is idle, until none is left."""
        while job.has_work():
            worker = await self._idle.get()
            try:
                if self._closed:
                    raise RewardError("The reward pool is closed; start a new one to score more.")
                await job.work_on(worker)
            finally:
                self._idle.put_nowait(worker)


class _Job:
    """The calls of one `score`, which of them wait, and what came of the others."""

    def __init__(self, calls: Sequence[RewardCall], num_workers: int) -> None:
        self._calls = calls
        self._num_workers = num_workers
        self._waiting = deque(range(len(calls)))
        self._suspects: deque[int] = deque()
        self._outcomes: list[RewardOutcome | None] = [None] * len(calls)

    def has_work(self) -> bool:
        return bool(self._waiting or self._suspects)

    def outcomes(self) -> list[RewardOutcome]:
        assert None not in self._outcomes
        return [outcome for outcome in self._outcomes if outcome is not None]

    async def work_on(self, worker: RewardWorker) -> None:
        """Give the worker one batch; put back what it could not answer."""
        batch = self._take()
        if not batch:
            return

        def answer(position: int, outcome: RewardOutcome) -> None:
            self._outcomes[batch[position]] = outcome

        left = await worker.score([self._calls[number] for number in batch], answer)
        numbers = [batch[position] for position in left]
        if worker.one_at_a_time:
            self._waiting.extendleft(reversed(numbers))
        else:  # they ran at once, so nobody could be blamed
            self._suspects.extend(numbers)

    def _take(self) -> list[int]:
        """The next batch: a lone suspect, all for a lone worker, or a share that shrinks, so that all end together."""
        if not self._waiting:
            return [self._suspects.popleft()] if self._suspects else []
        share = -(-len(self._waiting) // self._num_workers)
        size = min(MAX_BATCH, share if self._num_workers == 1 else max(min(MIN_BATCH, share), share // 2))
        return [self._waiting.popleft() for _ in range(size)]
