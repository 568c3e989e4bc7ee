"""One vLLM engine in a process of a benchmark's, and what its construction and its runs take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.core.versions import PolicyVersion
from forge_async.policy.settings import PolicySettings

if TYPE_CHECKING:
    from forge_async.policy.ports import Engine

NEW_TOKENS = 32
"""Steps of an engine's run, each a token of every sequence."""
PROMPT = np.arange(3, 11, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Cost:
    """What something took."""

    wall_s: float
    cpu_s: float
    """Of this process and of those that it waited for, such as the C++ compiler."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def over(self, number: int) -> Cost:
        """Of one of so many."""
        return Cost(self.wall_s / number, self.cpu_s / number)


@contextmanager
def clocked(found: list[Cost]) -> Iterator[None]:
    """Add what the block takes to `found`."""
    begun, cpu = time.perf_counter(), _cpu_s()
    yield
    found.append(Cost(time.perf_counter() - begun, _cpu_s() - cpu))


def _cpu_s() -> float:
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


_engines: list[Engine] = []
"""The one of this process."""


def build_engine(folder: Path, settings: PolicySettings) -> Cost:
    """Make this process's engine; returns what that took, imports included."""
    found: list[Cost] = []
    with clocked(found):
        from forge_async.backends.vllm_engine import VllmEngine

        _engines.append(VllmEngine(str(folder), settings, PolicyVersion()))
    return found[0]


def run_engine(num_sequences: int) -> tuple[Cost, int]:
    """Have it complete a prompt so many times; returns what that took, and its steps."""
    from forge_async.policy.ports import GenerationRequest, Sampling

    (engine,), found = _engines, []
    sampling = Sampling(max_new_tokens=NEW_TOKENS)
    request = GenerationRequest(id="0", prompt_token_ids=PROMPT, num_samples=num_sequences, seed=0, sampling=sampling)
    with clocked(found):
        engine.add([request])
        num_steps = 0
        while engine.num_unfinished():
            engine.step()
            num_steps += 1
    return found[0], num_steps


def load_engine(weights: Any, step: int) -> tuple[float, float]:
    """Load a version into it as a replica does; returns seconds beside the engine's steps, and between them."""
    (engine,), version = _engines, PolicyVersion(step=step)
    begun = time.perf_counter()
    prepared = engine.prepare(weights, version)
    beside = time.perf_counter()
    engine.load(prepared, version)
    return beside - begun, time.perf_counter() - beside


def score_with_engine(token_ids: Sequence[int]) -> np.ndarray:
    """float32 [T - 1], its log-probability of each token after the first."""
    (engine,) = _engines
    return engine.score(np.array(token_ids, dtype=np.int32))
