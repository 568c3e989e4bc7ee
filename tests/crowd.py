"""More requests than an engine's KV cache can hold, and what the limit on its sequences makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge_async.policy.concurrency import concurrency_limit
from forge_async.policy.driver import Driver
from forge_async.policy.swap import swap_mode
from tests import backends
from tests.engines import PROMPT, request

MAX_TURNS = 5000


@dataclass(frozen=True, kw_only=True)
class Course:
    """What was seen after each engine step until all requests were answered."""

    limits: list[int]
    kv_usage: list[float]
    num_waiting: list[int]
    """Sequences that waited for room inside the engine."""
    num_preemptions: int
    num_tokens: int
    """Of all answers."""


class Crowd:
    """A vLLM engine whose KV cache has room for a fraction of the sequences that it may decode together."""

    def __init__(self, folder: str) -> None:
        self._engine = backends.vllm_engine(folder, kv_cache_bytes=1 << 20)

    def answer(self, concurrency: str, num_requests: int, num_samples: int, tokens: int) -> Course:
        """Hand all requests over at once, under a limit as `policy.concurrency` says it, and step to the end."""
        limit, before = concurrency_limit(concurrency, 64), self._engine.occupancy().num_preemptions
        driver = Driver(self._engine, swap_mode("keep_kv"), limit)
        driver.enqueue(
            request(f"{concurrency}-{number}", PROMPT, n=num_samples, seed=4096 * number, tokens=tokens)
            for number in range(num_requests)
        )
        states, made = list[Any](), 0
        for _ in range(MAX_TURNS):
            progress = driver.turn()
            assert not progress.refused
            states.append(driver.state())
            made += sum(len(result.completions.token_ids) for result in progress.results)
            if not progress.runnable:
                break
        return Course(
            limits=[state.limit_sequences for state in states],
            kv_usage=[state.occupancy.kv_usage for state in states],
            num_waiting=[state.occupancy.num_waiting for state in states],
            num_preemptions=self._engine.occupancy().num_preemptions - before,
            num_tokens=made,
        )
