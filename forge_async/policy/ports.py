"""What the policy room asks of an inference engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forge_async.core.records import Completions
from forge_async.core.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int
    """Token limit of one completion."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these; that token belongs to the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to be completed n times: the requests of a group enter the engine together."""

    id: str
    """Unique among the unfinished requests of an engine."""
    prompt_token_ids: np.ndarray
    """int32 [T]."""
    num_samples: int
    """n, completions wanted."""
    seed: int
    """Completion i draws from the stream `seed + i`."""
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The n completions of a request."""

    id: str
    completions: Completions


class Engine(Protocol):
    """An inference engine. Synchronous and single-threaded: one thread makes all calls.

    Weights change only between steps; each token is stamped with the version that made it.
    """

    version: PolicyVersion
    """What the engine serves now."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Enqueue requests, in order. Raises PolicyError for one that the engine cannot serve."""
        ...

    def step(self) -> list[GenerationResult]:
        """Advance all running requests by one token; return the requests that finished."""
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests; those already finished are ignored."""
        ...

    def num_unfinished(self) -> int:
        """Requests that a further step would advance."""
        ...

    def load(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Replace the weights between steps, requests in flight or not.

        Args:
            weights: Hugging Face name to tensor, all parameters.
            version: what is stamped on tokens from the next step on.
        """
        ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of what is really served, by Hugging Face names, fused layers taken apart.

        Names that the engine does not hold are left out.
        """
        ...

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1], log-probability of each token after the first, given those before it."""
        ...

    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        ...
