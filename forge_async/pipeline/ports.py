"""The remote ends that the pipeline's loops call, and what they answer. Actors implement them, and tests' fakes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from forge_async.core.compact import Compact
from forge_async.core.records import PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.learner.ports import StepResult
from forge_async.pipeline.estimates import Estimate
from forge_async.policy.ports import GenerationRequest, GenerationResult
from forge_async.policy.service import ServiceStats
from forge_async.policy.swap import SwapRecord
from forge_async.weights.retention import Committed

Span = tuple[str, str, float, float, dict[str, Any] | None]
"""(name, category, start, duration, arguments), wall clock in seconds, for the trace."""
Spans = tuple[Span, ...]


class Admission(Protocol):
    """A group to be made: what the replay actor hands to a replica's loop."""

    @property
    def index(self) -> int: ...
    @property
    def prompt_id(self) -> PromptId: ...
    @property
    def attempt(self) -> int: ...
    @property
    def fresh(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord(Compact):
    """What the controller learns of a group that was made: numbers and one text, never the tokens."""

    index: int
    prompt_id: str
    replica: str
    outcome: str = ""
    """How it ended without being trained on (`filtered`, `failed`), or "" for one that was handed to replay."""
    reason: str = ""
    """Why it ended so, in a word or two."""
    generated_s: float | None = None
    """Wall clock of its last token; None when it was not made."""
    scored_s: float | None = None
    """Wall clock of its last reward; None when it was not made."""
    num_tokens: int = 0
    """Tokens of all its samples, prompts included."""
    completion_tokens: int = 0
    versions: tuple[int, int] | None = None
    """Steps of the oldest and the newest version of its tokens."""
    reward_mean: float | None = None
    prompt: str = ""
    completion: str = ""
    """Its first rollout, as text."""
    reward: float = 0.0
    """Of that rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerStep:
    """A learner step, as one rank saw it."""

    result: StepResult
    batch: dict[str, Any]
    """What the replay actor said of the batch."""
    wait_data_s: float
    """Seconds from asking for the batch to having this rank's share."""
    snapshot_s: float
    """Seconds until the copy of the parameters was on its way; 0 when this version is not published."""
    snapshot_bytes: int
    spans: Spans
    rss_bytes: int
    cpu_s: float
    """CPU seconds of the process since it began."""
    broken_broadcasts: tuple[str, ...] = ()
    """What broke off since the step before, and why, in a sentence each; who missed it pulls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull:
    """How a version arrived at a replica."""

    version: PolicyVersion
    fetch_s: float
    """Seconds from the request to having all bytes, in the engine's form, with generation going on."""
    pause_s: float
    """Seconds in which the replica made no token because of the swap, from the stop to the first chance of a step."""
    num_bytes: int
    """Bytes that travelled."""
    held_bytes: int
    """Most bytes held beside the engine's own weights meanwhile."""
    started_s: float
    """Wall clock."""
    swap: SwapRecord | None = None
    """What the swap did to the requests in flight."""
    transport: str = ""
    """What carried it."""
    damage: str = ""
    """Why deltas were given up for the last whole version and all deltas since; "" when they were not."""
    probe_gap: float | None = None
    """How far a token of the probe is from the learner's log-probability on average, in nats; None without a probe."""

    def without_cost(self, started_s: float) -> Pull:
        """What answers a pull of an older version, which found this one served and did nothing."""
        return replace(self, started_s=started_s, fetch_s=0.0, pause_s=0.0, num_bytes=0, swap=None, damage="")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """What a replica did since it was last asked."""

    service: ServiceStats
    kv_usage: float
    rss_bytes: int
    cpu_s: float
    num_running: int = 0
    """Sequences that the engine's next step advances."""
    num_waiting: int = 0
    """Sequences that wait for room inside the engine."""
    num_queued: int = 0
    """Requests that wait outside the engine for the limit."""
    limit_sequences: int = 0
    """The most sequences that the engine is given at once (`policy.concurrency`); 0: all."""
    num_preemptions: int = 0
    """How often since then a running sequence lost its KV for want of room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a rollout worker did since it was last asked."""

    score_s: float
    spans: Spans
    rss_bytes: int
    cpu_s: float
    num_cut: int = 0
    """Rollouts that were cut off at their deadline."""
    num_salvaged: int = 0
    """Groups that went on without some of their rollouts."""
    num_oversize: int = 0
    """Samples above `learner.max_sample_tokens`, cut or refused."""
    num_unknown_tokens: int = 0
    """Sampled tokens that are not trained on because their kept set was too large to be recorded."""
    reference_s: float | None = None
    """Seconds spent waiting for the reference service; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """How often k samples of a prompt hold one that solves it."""

    k: int
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScores:
    """What held-out prompts scored."""

    num_prompts: int
    greedy: Estimate
    """Mean score of the greedy answers."""
    num_samples: int
    """Samples drawn of each prompt beside; 0: none."""
    sampled: Estimate | None
    """Mean score of these."""
    pass_at: tuple[PassAtK, ...]
    """In ascending k."""
    oldest_version: int
    """Step of the oldest version that made a token of the answers."""
    newest_version: int
    """Step of the newest one."""


class PolicyClient(Protocol):
    """One policy replica, from the side of whoever wants tokens."""

    async def submit(
        self, ticket: str, requests: Sequence[GenerationRequest], linger_s: float
    ) -> tuple[list[GenerationResult], bool]:
        """Queue requests that belong together, under a name unlike any other's, and `collect` the first that finish."""
        ...

    async def collect(self, ticket: str, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Finished requests of the ticket (at least one, unless none is left), and whether none is left."""
        ...

    async def cut(self, ticket: str) -> list[GenerationResult]:
        """End what is unfinished now, and return what was not collected: finished rows whole, others marked as cut.

        A `collect` that still waits returns without them. A submission that has not arrived returns what is cut then.
        """
        ...


class Replica(Protocol):
    """One policy replica, from the side of the loops."""

    name: str

    async def pull(self, version: PolicyVersion) -> Pull:
        """Have it serve a version; an older one than it serves is superseded, and left (Law 4)."""
        ...

    async def stats(self) -> ReplicaStats: ...
    async def score(self, token_ids: np.ndarray) -> tuple[PolicyVersion, np.ndarray]: ...


class Workers(Protocol):
    """The rollout workers, as one."""

    async def make(self, admissions: Sequence[Admission], replica: str) -> list[GroupRecord]:
        """Make groups on a replica and hand them to the replay actor."""
        ...

    async def evaluate(self, num_prompts: int, replica: str, name: str) -> EvalScores | None:
        """Have a replica answer at most `num_prompts` held-out prompts; None when there are none."""
        ...

    async def stats(self) -> list[WorkerReport]:
        """What each did since the last call, told now or at most a second ago."""
        ...


class Replay(Protocol):
    """The replay actor, from the side of the loops. Waits end with StallError after the run's step deadline."""

    async def add_replica(self, replica: str, step: int) -> None: ...
    async def admit(self, replica: str, max_groups: int) -> Sequence[Admission]: ...
    async def trained(self, step: int) -> None:
        """The steps up to `step` are done. A learner that asks for a later batch says so too, and `published` does."""
        ...

    async def published(self, step: int) -> None:
        """Version `step` can be pulled, so the steps that it comes after are done."""
        ...

    async def pulled(self, replica: str, step: int) -> None: ...
    async def set_max_staleness(self, max_staleness: int) -> None: ...
    async def state(self) -> dict[str, float]: ...
    async def why(self) -> str: ...
    async def close(self, reason: str) -> dict[str, float]: ...


class Learner(Protocol):
    """All learner ranks, as one."""

    async def step(self, step: int, snapshot: bool) -> list[LearnerStep]: ...
    async def snapshot(self) -> PolicyVersion: ...
    async def stage(self, version: PolicyVersion) -> None:
        """Put every rank's shards of a snapshot into the store; one that is alone may leave it to `commit`."""
        ...

    async def restage(self, version: PolicyVersion) -> None:
        """Stage whole what was staged last, whose delta is of no use; `commit` then makes it readable so."""
        ...

    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        """Make a version readable, then `retire` others, in one call."""
        ...

    async def retire(self, version: PolicyVersion) -> None: ...
    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]: ...
    async def save(self, folder: str) -> None: ...
    async def save_state(self, folder: str) -> None: ...
    async def digest(self) -> str: ...
