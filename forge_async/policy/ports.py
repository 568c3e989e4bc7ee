"""What the policy room asks of an inference engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from forge_async.core.compact import Compact
from forge_async.core.errors import PolicyError
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
    """Sample among the likeliest tokens that together have this probability; 1: among all. Below 1 it needs top_k."""
    top_k: int = 0
    """Sample among so many likeliest tokens; 0: among all."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these; that token belongs to the completion."""
    stop_strings: tuple[str, ...] = ()
    """A completion ends with the token that completes the first of these in its text; that token belongs to it."""
    gives_kept_sets: bool = True
    """Whether kept sets are wanted where tokens are left out; what is not trained on needs none."""

    def __post_init__(self) -> None:
        """Raise PolicyError for kept sets without a bound."""
        if self.leaves_out and not self.top_k:
            raise PolicyError(
                f"top_p={self.top_p:g} alone has no bound on the tokens that it keeps, which travel with each sampled "
                "token; give top_k too."
            )

    @property
    def records_kept_sets(self) -> bool:
        """Whether the completions come with kept sets."""
        return self.leaves_out and self.gives_kept_sets

    @property
    def leaves_out(self) -> bool:
        """Whether tokens are left out before one is drawn, so that the kept set must travel with each token (Law 8)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(Compact):
    """One prompt to be completed n times: the requests of a group enter the engine together."""

    id: str
    """Unique among those submitted together."""
    prompt_token_ids: np.ndarray
    """int32 [T]."""
    num_samples: int
    """n, completions wanted."""
    seed: int
    """Completion i draws from the stream `seed + i`."""
    sampling: Sampling
    urgent: bool = False
    """Whether a step waits for it: it enters the engine before requests that are not urgent."""
    num_given: int = 0
    """So many tokens at the prompt's end belong to the completion: an earlier try made them. Stop strings may begin
    there."""
    prefix: Completions | None = None
    """What an earlier try has made, a row for each completion: rows that were cut go on from there (Law 4), the others
    are complete. The result has the whole rows. An engine itself never sees a prefix: it is taken apart before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult(Compact):
    """The n completions of a request."""

    id: str
    completions: Completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """How full an engine is."""

    num_running: int
    """Sequences that a step advances."""
    num_waiting: int
    """Sequences that were added and wait for room inside the engine, preempted ones included."""
    num_preemptions: int
    """How often a running sequence lost its KV for want of room, since the engine began."""
    kv_usage: float
    """Share of the KV cache in use, 0 to 1."""


class Engine(Protocol):
    """An inference engine. Synchronous and single-threaded: one thread makes all calls.

    Weights change only between steps; each token is stamped with the version that made it.
    """

    version: PolicyVersion
    """What the engine serves now."""
    versions_held: int
    """How many versions can serve requests side by side; 1: a load is for all of them."""
    sealed: frozenset[str]
    """Hugging Face names of parameters that it keeps in a form which cannot be read back, as quantised ones."""

    def add(self, requests: Sequence[GenerationRequest]) -> dict[str, str]:
        """Enqueue requests, in order; their ids are unique among the unfinished ones.

        Returns why the engine cannot serve a request, by id; the others are enqueued all the same.
        """
        ...

    def step(self) -> list[GenerationResult]:
        """Advance all running requests by one token; return the requests that finished."""
        ...

    def cut(self, ids: Iterable[str]) -> list[GenerationResult]:
        """End requests now and return what they have made: finished rows whole, the others as far as they came.

        Ids that the engine does not hold are left out.
        """
        ...

    def num_unfinished(self) -> int:
        """Requests that a further step would advance."""
        ...

    def prepare(self, weights: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        """Bring weights into the form that the engine keeps them in, so that `load` has only to copy.

        The one method for any thread: it changes nothing of the engine, which goes on stepping.
        Raises WeightsError like `load`, which does the same for weights that were not prepared.
        """
        ...

    def load(self, weights: Mapping[str, Any] | None, version: PolicyVersion, *, keep_kv: bool = True) -> int:
        """Replace the weights between steps, requests in flight or not.

        No request that comes or begins later is served from KV of before, or of requests that were running now.

        Args:
            weights: Hugging Face name to tensor, all parameters; None for an engine whose ranks have fetched their own
                slices of them.
            version: what is stamped on tokens from the next step on.
            keep_kv: whether running requests keep the KV that the old weights made; it is computed again otherwise.

        Returns the tokens of running requests whose KV was dropped.
        Raises WeightsError, before anything is written, when a tensor's shape or dtype is not the engine's.
        """
        ...

    def keeps_apart(self, weights: Mapping[str, Any] | None) -> bool:
        """Whether these weights can be loaded beside those that requests in flight go on with."""
        ...

    def has_room(self) -> bool:
        """Whether a version can be loaded beside the others now; if not, then when an older one's last request ends."""
        ...

    def load_beside(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Have requests that come from now on served with these weights, which `keeps_apart` holds for.

        Requests in flight keep theirs, and tokens are stamped accordingly. Raises like `load`, and PolicyError when
        there is no room; either way all goes on as it was.
        """
        ...

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of what is really served, by Hugging Face names, fused layers taken apart.

        Names that the engine does not hold are left out. One comes more than once where several ranks hold copies.
        """
        ...

    def first_wrong(self, names: Iterable[str]) -> str:
        """The first of these sealed parameters with which the engine does not compute what was loaded; "" if none."""
        ...

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1], log-probability of each token after the first, given those before it."""
        ...

    def occupancy(self) -> Occupancy:
        """How full the engine is."""
        ...
