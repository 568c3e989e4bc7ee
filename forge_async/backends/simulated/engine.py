"""A continuous-batching engine that sleeps: every running rollout grows at one pace, which the load sets.

The engine counts the tokens that a rollout would have made had it run since the beginning (`_grown`). A rollout of L
tokens that starts at count V ends at V + L, and a weight swap is a mark on the same axis: so neither tokens nor
versions need a look at every step.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from forge_async.backends.simulated.times import EngineTimes
from forge_async.core.clock import Clock
from forge_async.core.versions import PolicyVersion

EPSILON_TOKENS = 1e-6
"""Counts nearer than this are the same: sums of floating-point seconds are not exact."""
EPSILON_S = 1e-9
"""Nor are times that differ by less than this worth a timer of their own."""

Run = tuple[int, int, int]
"""(tokens, step, incarnation), as VersionRuns reads them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Rollout:
    """One completion in the making."""

    num_prompt_tokens: int
    length_tokens: int
    done: Callable[[list[Run]], None]
    """Called with the version runs of its tokens when the last one is made."""
    started_at: float = 0.0
    """The engine's count when its first token was begun."""


@dataclass(slots=True, kw_only=True)
class SwapCost:
    """What weight swaps have cost so far."""

    pause_s: float = 0.0
    """Seconds in which no token was made because of a swap, rebuilding of KV included."""
    discarded_tokens: int = 0
    """Tokens made and thrown away."""
    recomputed_tokens: int = 0
    """Tokens, of prompts and of completions, whose KV was computed again."""


@dataclass(slots=True)
class _Load:
    """What is in the engine."""

    running: list[tuple[float, int, Rollout]] = field(default_factory=list)
    """Heap of (count at which it ends, arrival, rollout)."""
    queued: deque[Rollout] = field(default_factory=deque)
    """Waits for a free slot."""


class SimulatedEngine:
    """Runs rollouts and swaps versions, on a clock of its own choosing."""

    def __init__(self, times: EngineTimes, clock: Clock, version: PolicyVersion) -> None:
        self.version = version
        self.cost = SwapCost()
        self.busy_s = 0.0
        """Seconds in which at least one rollout was running and not paused."""
        self.made_tokens = 0
        """Tokens of finished rollouts."""
        self._times, self._clock = times, clock
        self._load = _Load()
        self._arrivals = itertools.count()
        self._grown, self._looked_s = 0.0, clock.now_s()
        self._marks: list[tuple[float, PolicyVersion]] = [(0.0, version)]
        """(count, version): which version made tokens from there on."""
        self._stops = 0
        """Reasons for which no token is made at present."""
        self._holds = 0
        """Reasons for which no queued rollout starts at present."""
        self._changed = asyncio.Event()
        self._emptied = asyncio.Event()

    def add(self, rollout: Rollout) -> None:
        """Start a rollout, or queue it when every slot is taken."""
        self._look()
        self._load.queued.append(rollout)
        self._changed.set()

    def cut(self, rollouts: Collection[Rollout]) -> None:
        """End rollouts now, as far as they came; those that have ended already are left alone."""
        self._look()
        self._finish()
        load = self._load
        for rollout in [each for _, _, each in load.running if each in rollouts]:
            rollout.length_tokens = self._made(rollout, self._grown)
            rollout.done(self._runs(rollout))
        for rollout in [each for each in load.queued if each in rollouts]:
            rollout.length_tokens = 0
            rollout.done([])
        load.running = [entry for entry in load.running if entry[2] not in rollouts]
        heapq.heapify(load.running)
        load.queued = deque(each for each in load.queued if each not in rollouts)
        if not load.running:
            self._emptied.set()
        self._changed.set()

    async def serve(self) -> None:
        """Finish rollouts as their time comes, for ever."""
        while True:
            self._look()
            self._finish()
            self._start_queued()
            self._changed = asyncio.Event()
            timer = self._timer(self._changed)
            try:
                await self._changed.wait()
            finally:
                if timer is not None:
                    timer.cancel()

    async def swap(self, version: PolicyVersion, mode: str, fetch_s: float) -> None:
        """Fetch a version for `fetch_s` seconds and serve it, with what is in flight treated as `async.swap` says.

        keep_kv: nothing stops but for the swap. recompute_kv: as that, then the KV of what is in flight is rebuilt.
        abort_resume: the same rebuilding, after every request was resubmitted. abort_retry: what is in flight begins
        again from its prompt. drain: nothing starts until what is in flight has ended. blocking: nothing is made from
        the beginning of the fetch on, and the KV is rebuilt.
        """
        begun_s = self._clock.now_s()
        if mode == "blocking":
            self._stop()
        await self._clock.sleep(fetch_s)
        if mode == "drain":
            await self._drain()
        if mode != "blocking":
            begun_s = self._clock.now_s()
            self._stop()
        self._mark(version)
        await self._clock.sleep(self._times.swap_s + self._settle(mode))
        self._look()
        self._stops -= 1
        self._holds -= mode == "drain"
        self.cost.pause_s += self._clock.now_s() - begun_s
        self._changed.set()

    def num_unfinished(self) -> int:
        """Rollouts running or queued."""
        return len(self._load.running) + len(self._load.queued)

    def fill(self) -> float:
        """Share of the slots in use, 0 to 1."""
        return len(self._load.running) / self._times.max_sequences

    def _rate(self) -> float:
        """Tokens a second of each running rollout."""
        return 0.0 if self._stops or not self._load.running else 1.0 / self._times.token_s(len(self._load.running))

    def _look(self) -> None:
        """Bring the count up to now."""
        now_s = self._clock.now_s()
        rate = self._rate()
        self._grown += (now_s - self._looked_s) * rate
        self.busy_s += (now_s - self._looked_s) * (rate > 0)
        self._looked_s = now_s

    def _finish(self) -> None:
        running = self._load.running
        soon = self._grown + EPSILON_TOKENS + EPSILON_S * self._rate()
        while running and running[0][0] <= soon:
            rollout = heapq.heappop(running)[2]
            self.made_tokens += rollout.length_tokens
            rollout.done(self._runs(rollout))
        if not running:
            self._emptied.set()

    def _start_queued(self) -> None:
        while self._load.queued and not self._holds and len(self._load.running) < self._times.max_sequences:
            self._start(self._load.queued.popleft())

    def _start(self, rollout: Rollout) -> None:
        rollout.started_at = self._grown
        heapq.heappush(self._load.running, (self._grown + rollout.length_tokens, next(self._arrivals), rollout))

    def _timer(self, changed: asyncio.Event) -> asyncio.Task[None] | None:
        rate = self._rate()
        if not rate:
            return None
        delay_s = max(0.0, self._load.running[0][0] - self._grown) / rate
        return asyncio.create_task(self._set_after(delay_s, changed), name="next rollout")

    async def _set_after(self, delay_s: float, changed: asyncio.Event) -> None:
        await self._clock.sleep(delay_s)
        changed.set()

    def _stop(self) -> None:
        self._look()
        self._finish()
        self._stops += 1
        self._changed.set()

    async def _drain(self) -> None:
        self._holds += 1
        while self._load.running:
            self._emptied = asyncio.Event()
            await self._emptied.wait()

    def _mark(self, version: PolicyVersion) -> None:
        self.version = version
        self._marks.append((self._grown, version))
        oldest = min((rollout.started_at for _, _, rollout in self._load.running), default=self._grown)
        while len(self._marks) > 1 and self._marks[1][0] <= oldest:
            del self._marks[0]

    def _settle(self, mode: str) -> float:
        """Do to what is in flight what a swap does to it; returns the seconds that this takes."""
        flying = [rollout for _, _, rollout in self._load.running]
        if mode in ("keep_kv", "drain"):
            return 0.0
        made = [self._made(rollout, self._grown) for rollout in flying]
        recomputed = sum(rollout.num_prompt_tokens for rollout in flying)
        if mode == "abort_retry":
            self.cost.discarded_tokens += sum(made)
            self._load.running = []
            for rollout in flying:
                self._start(rollout)
        else:
            recomputed += sum(made)
        self.cost.recomputed_tokens += recomputed
        resubmitted = len(flying) if mode in ("abort_resume", "abort_retry") else 0
        return recomputed * self._times.prefill_token_s + resubmitted * self._times.resubmit_s

    def _made(self, rollout: Rollout, count: float) -> int:
        """Tokens that a rollout had when the engine's count was `count`."""
        return min(max(math.floor(count - rollout.started_at + EPSILON_TOKENS), 0), rollout.length_tokens)

    def _runs(self, rollout: Rollout) -> list[Run]:
        """Which version made how many of its tokens."""
        edges = [self._made(rollout, count) for count, _ in self._marks] + [rollout.length_tokens]
        return [
            (stop - start, version.step, version.incarnation)
            for start, stop, (_, version) in zip(edges[:-1], edges[1:], self._marks, strict=True)
        ]
