"""Fakes of the seams: small, exact, in memory. The contract suites hold them to what the real backends do.

The engine and the learner are one bigram model in numpy (logits of the next token are a row of a table), so that
log-probabilities, gradients and weights mean something and can be worked out by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.core import kept_sets
from forge_async.core.clock import within
from forge_async.core.errors import LearnerError, NonFiniteError, PolicyError, WeightsError
from forge_async.core.records import Completions, Prompt, PromptId
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.learner.batch import Share
from forge_async.learner.ports import StepResult
from forge_async.pipeline.estimates import Estimate
from forge_async.pipeline.ports import EvalScores, GroupRecord, LearnerStep, Pull, ReplicaStats, WorkerReport
from forge_async.policy.ports import GenerationRequest, GenerationResult, Occupancy, Sampling
from forge_async.policy.service import ServiceStats
from forge_async.reward.ports import RewardCall, RewardFault, RewardOutcome
from forge_async.weights.copy_out import CopyOut
from forge_async.weights.manifest import Part
from forge_async.weights.retention import Committed
from forge_async.weights.transports import Transport

TABLE = "table.weight"
"""Hugging Face name of the bigram model's one parameter."""
VOCAB = 98


def bigram_table(seed: int, vocab: int = VOCAB) -> np.ndarray:
    """float32 [V, V], the weights of a fake model."""
    return np.random.default_rng(seed).normal(size=(vocab, vocab)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclass
class _Running:
    """One completion in the making."""

    rng: np.random.Generator
    last: int
    given: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[PolicyVersion] = field(default_factory=list)
    kept_sets: list[np.ndarray] = field(default_factory=list)
    truncated: bool = False
    done: bool = False
    pinned: tuple[np.ndarray, PolicyVersion] | None = None
    """Table and version that it goes on with, whatever was loaded beside them."""


class FakeEngine:
    """A bigram model behind the Engine port. `log` keeps the calls, in order; `fail_at_step` makes a step raise.

    `versions_held`: how many versions can serve requests side by side.
    """

    def __init__(self, table: np.ndarray | None = None, version: PolicyVersion | None = None, max_tokens: int = 64):
        self.table = bigram_table(0) if table is None else table
        self.version = version or PolicyVersion()
        self.log: list[tuple[str, Any]] = []
        self.fail_at_step: int | None = None
        self.versions_held = 1
        self.sealed: frozenset[str] = frozenset()
        self.wrong = ""
        """What `first_wrong` answers for the names that are sealed."""
        self.num_steps = 0
        self._max_tokens = max_tokens
        self._running: dict[str, tuple[GenerationRequest, list[_Running]]] = {}

    def add(self, requests: Sequence[GenerationRequest]) -> dict[str, str]:
        refused = {}
        for request in requests:
            if len(request.prompt_token_ids) + request.sampling.max_new_tokens > self._max_tokens:
                refused[request.id] = "it is too long"
                continue
            assert request.prefix is None
            assert request.id not in self._running
            self.log.append(("add", request.id))
            prompt = request.prompt_token_ids.tolist()
            given = prompt[len(prompt) - request.num_given :]
            rows = [
                _Running(np.random.default_rng(request.seed + i), prompt[-1], given) for i in range(request.num_samples)
            ]
            self._running[request.id] = (request, rows)
        return refused

    def step(self) -> list[GenerationResult]:
        self.num_steps += 1
        self.log.append(("step", self.num_steps))
        if self.fail_at_step == self.num_steps:
            raise RuntimeError("out of memory")
        finished = []
        for request, rows in list(self._running.values()):
            for row in rows:
                if not row.done:
                    self._advance(row, request.sampling)
            if all(row.done for row in rows):
                del self._running[request.id]
                finished.append(_result_of(request.id, rows))
        return finished

    def cut(self, ids: Iterable[str]) -> list[GenerationResult]:
        return [_result_of(id, self._running.pop(id)[1]) for id in ids if id in self._running]

    def num_unfinished(self) -> int:
        return len(self._running)

    def prepare(self, weights: Mapping[str, Any], version: PolicyVersion) -> Mapping[str, Any]:
        self.log.append(("prepare", version.step))
        return weights

    def load(self, weights: Mapping[str, Any], version: PolicyVersion, *, keep_kv: bool = True) -> int:
        table = weights[TABLE]
        if tuple(table.shape) != self.table.shape or not str(table.dtype).endswith("float32"):
            raise WeightsError(
                f"{version} has {TABLE} as {table.dtype} {tuple(table.shape)}; the engine holds another."
            )
        self.log.append(("load", version.step))
        self.table = np.array(table, dtype=np.float32)
        self.version = version
        running = [(request, row) for request, rows in self._running.values() for row in rows if not row.done]
        return 0 if keep_kv else sum(len(request.prompt_token_ids) + len(row.tokens) for request, row in running)

    def keeps_apart(self, weights: Mapping[str, Any] | None) -> bool:
        return self.versions_held > 1 and weights is not None

    def has_room(self) -> bool:
        old = {row.pinned[1] for _, rows in self._running.values() for row in rows if row.pinned}
        current = any(not row.pinned for _, rows in self._running.values() for row in rows)
        return len(old) + max(current, 1) < self.versions_held

    def load_beside(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        assert self.has_room()
        table, served = self.table, self.version
        self.load(weights, version)
        for row in (row for _, rows in self._running.values() for row in rows):
            row.pinned = row.pinned or (table, served)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        import torch

        yield from ((name, torch.from_numpy(self.table)) for name in names if name == TABLE and name not in self.sealed)

    def first_wrong(self, names: Iterable[str]) -> str:
        return self.wrong if self.wrong in self.sealed.intersection(names) else ""

    def score(self, token_ids: np.ndarray) -> np.ndarray:
        logprobs = log_softmax(self.table[token_ids[:-1]])
        return logprobs[np.arange(len(token_ids) - 1), token_ids[1:]].astype(np.float32)

    def occupancy(self) -> Occupancy:
        running = sum(not row.done for _, rows in self._running.values() for row in rows)
        return Occupancy(num_running=running, num_waiting=0, num_preemptions=0, kv_usage=min(1.0, running / 100))

    def _advance(self, row: _Running, sampling: Sampling) -> None:
        table, version = row.pinned or (self.table, self.version)
        if sampling.temperature > 0:
            logits = table[row.last] / sampling.temperature
            logprobs = log_softmax(_without_left_out(logits, sampling) if sampling.leaves_out else logits)
            token = int(np.argmax(logprobs + row.rng.gumbel(size=len(logprobs))))
        else:
            logprobs = log_softmax(table[row.last])
            token = int(np.argmax(logprobs))
        row.tokens.append(token)
        if sampling.records_kept_sets:
            order = np.argsort(-logprobs, kind="stable")
            row.kept_sets.append(kept_sets.from_logprobs(order[None], logprobs[order][None], is_whole=True))
        row.logprobs.append(float(logprobs[token]))
        row.versions.append(version)
        row.last = token
        text = FakeRenderer().decode([*row.given, *row.tokens]) if sampling.stop_strings else ""
        stopped = token in sampling.stop_token_ids or any(each in text for each in sampling.stop_strings)
        row.truncated = not stopped and len(row.tokens) == sampling.max_new_tokens
        row.done = stopped or row.truncated


def _result_of(id: str, rows: Sequence[_Running]) -> GenerationResult:
    versions = [version for row in rows for version in row.versions]
    sets = [kept_set for row in rows for kept_set in row.kept_sets]
    return GenerationResult(
        id=id,
        completions=Completions(
            lengths=np.array([len(row.tokens) for row in rows], dtype=np.int32),
            token_ids=np.array([token for row in rows for token in row.tokens], dtype=np.int32),
            logprobs=np.array([logprob for row in rows for logprob in row.logprobs], dtype=np.float32),
            versions=VersionRuns.of((1, version.step, version.incarnation) for version in versions),
            truncated=np.array([row.truncated for row in rows]),
            cut=np.array([not row.done for row in rows]),
            kept_set=kept_sets.lay_together(sets, [1] * len(sets)),
        ),
    )


def _without_left_out(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Logits with -inf for what top-k, and then top-p, leaves out."""
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    before = np.cumsum(np.exp(log_softmax(logits[order]))) - np.exp(log_softmax(logits[order]))
    left = np.full_like(logits, -np.inf)
    chosen = order[before < sampling.top_p]
    left[chosen] = logits[chosen]
    return left


class FakeLearner:
    """One rank that trains a bigram model by plain policy gradient, behind the Learner port."""

    def __init__(self, table: np.ndarray | None = None, lr: float = 0.1, version: PolicyVersion | None = None):
        self.table = (bigram_table(0) if table is None else table).astype(np.float32).copy()
        self.version = version or PolicyVersion()
        self.snapshot_bytes = 0
        self._lr, self._copy_out = lr, CopyOut()

    def train(self, share: Share) -> StepResult:
        gradient, loss = np.zeros_like(self.table, dtype=np.float64), 0.0
        denominator = max(share.num_loss_tokens, 1)
        if share.samples is not None:
            samples, edges = share.samples, set(share.samples.bounds().tolist())
            for at in np.flatnonzero(samples.loss_mask):
                assert at not in edges, "a sample's first token has nothing before it"
                last, token, advantage = samples.token_ids[at - 1], samples.token_ids[at], float(samples.advantages[at])
                logprobs = log_softmax(self.table[last])
                loss -= advantage * logprobs[token] / denominator
                gradient[last] += advantage * np.exp(logprobs) / denominator
                gradient[last, token] -= advantage / denominator
        if not np.isfinite(loss):
            raise NonFiniteError(f"Step {self.version.step}: loss={loss} over groups {share.group_indices}.")
        self._copy_out.wait()
        self.table = (self.table - self._lr * gradient).astype(np.float32)
        self.version = self.version.next()
        return step_result(
            version=self.version,
            loss=loss,
            grad_norm=float(np.linalg.norm(gradient)),
            lr=self._lr,
            num_loss_tokens=share.num_loss_tokens,
            num_row_tokens=share.samples.num_tokens if share.samples else 0,
            num_sample_tokens=share.samples.num_tokens if share.samples else 0,
        )

    def snapshot(self, blob: Any = None) -> tuple[Part, Any]:
        import torch

        from forge_async.weights.packing import LocalShard, Packer

        table = torch.from_numpy(self.table)
        shard = LocalShard(name=TABLE, tensor=table, global_shape=tuple(table.shape), offsets=(0, 0))
        part, blob = Packer(0).pack([shard], blob)
        self.snapshot_bytes = blob.numel()
        return part, blob

    def begin_snapshot(self, copier: Executor, blob: Any = None) -> Future[tuple[Part, Any]]:
        return self._copy_out.begin(copier, lambda: self.snapshot(blob))

    def score(self, token_ids: Sequence[np.ndarray], temperature: float = 0.0) -> list[np.ndarray]:
        return [FakeEngine(self.table / (temperature or 1.0)).score(ids) for ids in token_ids]

    def save(self, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({TABLE: torch.from_numpy(self.table.copy())}, folder / "model.safetensors")

    def save_state(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "table.npy", self.table)

    def restore(self, folder: Path, version: PolicyVersion) -> None:
        if not (folder / "table.npy").exists():
            raise LearnerError(f"The checkpoint in {folder} cannot be read; delete its folder to go on without it.")
        self.table, self.version = np.load(folder / "table.npy"), version

    def digest(self) -> str:
        head = f"{TABLE} torch.float32 {self.table.shape}".encode()
        return hashlib.sha256(head + self.table.tobytes()).hexdigest()


class StoreCrashError(Exception):
    """The process that used the store died there."""


class MemoryStore:
    """A WeightStore in this process. `crash_after` operations it stops working, as its client's death would.

    Putting or deleting several keys is as many operations, so that it may end in between.
    """

    transport = Transport(
        name="memory",
        late_joiners=True,
        survives_members=True,
        cross_host=False,
        is_shared=False,
    )

    def __init__(self, crash_after: int | None = None) -> None:
        self.data: dict[str, Any] = {}
        self.crash_after = crash_after
        self.operations: list[tuple[str, str]] = []

    @property
    def carried_by(self) -> str:
        return self.transport.name

    async def reserve(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        for key, value in items.items():
            await self._operate("put", key)
            self.data[key] = _copied(value)
        for prefix in forget:
            await self.delete(prefix)

    @contextlib.asynccontextmanager
    async def reading(self, keys: Sequence[str]):
        values = []
        for key in keys:
            await self._operate("get", key)
            values.append(_copied(self.data[key]))
        yield values

    async def delete(self, prefix: str) -> None:
        keys = [key for key in self.data if key.startswith(prefix)]
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest")):
            await self._operate("delete", key)
            del self.data[key]

    async def keys(self) -> list[str]:
        await self._operate("keys", "")
        return list(self.data)

    async def close(self) -> None:
        pass

    async def _operate(self, name: str, key: str) -> None:
        if self.crash_after is not None and len(self.operations) >= self.crash_after:
            raise StoreCrashError(f"{name} {key}")
        self.operations.append((name, key))
        await asyncio.sleep(0)


def _copied(value: Any) -> Any:
    """What another process would hold: tensors are copied, the other values never change."""
    return value.clone() if hasattr(value, "clone") else value


class FakeRenderer:
    """Text as numbers: token i of `render` is the i-th character's code minus 32, plus 3."""

    stop_token_ids, pad_token_id, vocab_size = (2,), 0, VOCAB

    def render(self, text: str, system: str = "") -> np.ndarray:
        return np.array([1, *(ord(character) - 29 for character in system + text)], dtype=np.int32)

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        return self.render("".join(message["content"] for message in messages))

    def encode(self, text: str) -> np.ndarray:
        return self.render(text)[1:]

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(int(token) + 29) for token in token_ids if token >= 3)

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


class FakeSource:
    """Prompts `p<index>` without end."""

    name = "fake"

    def __init__(self, size: int = 1000) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def prompt(self, id: PromptId) -> Prompt:
        text = f"p{id.index}"
        return Prompt(id=id, token_ids=FakeRenderer().render(text), text=text, data={"answer": id.index})

    def held_out(self, num_prompts: int) -> list[Prompt]:
        return [self.prompt(PromptId(source="held out", epoch=0, index=i)) for i in range(num_prompts)]


class FakeRewards:
    """Scores with a plain function of (prompt text, completion); a ValueError becomes a fault that names the prompt."""

    def __init__(self, score=lambda prompt, completion: float(len(completion))) -> None:
        self._score = score
        self.calls: list[RewardCall] = []

    async def start(self) -> None: ...

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        self.calls += calls
        return [self._outcome(call) for call in calls]

    async def close(self) -> None: ...

    def _outcome(self, call: RewardCall) -> RewardOutcome:
        try:
            return RewardOutcome(value=self._score(call.prompt, call.completion))
        except ValueError as error:
            return RewardOutcome(error=RewardFault(kind="raised", message=f"The reward of {call.prompt!r}: {error}."))


def step_result(**fields: Any) -> StepResult:
    """A StepResult whose other fields are plain."""
    plain: dict[str, Any] = dict.fromkeys(
        ("loss", "grad_norm", "lr", "clip_fraction", "mismatch_kl", "logprob_diff_max", "compute_s"), 0.0
    )
    return StepResult(**plain | {"num_loss_tokens": 0, "num_row_tokens": 0, "num_sample_tokens": 0} | fields)


def eval_scores(score: float, versions: tuple[int, int] = (0, 0), **fields: Any) -> EvalScores:
    """What an evaluation of 2 prompts found, without samples unless `fields` say so."""
    return EvalScores(
        **{"num_samples": 0, "sampled": None, "pass_at": ()} | fields,
        num_prompts=2,
        greedy=Estimate(mean=score, low=score / 2, high=(1 + score) / 2),
        oldest_version=versions[0],
        newest_version=versions[1],
    )


# The remote ends that the ring calls.


@dataclass(frozen=True)
class FakeAdmission:
    index: int
    prompt_id: PromptId
    attempt: int = 0
    fresh: bool = False


class FakeReplay:
    """Admission in order under the bound of Law 2 with W = 1, batches of the oldest P groups; waits end after 5 s."""

    def __init__(self, groups_per_step: int, max_staleness: int, first_step: int = 0) -> None:
        self._groups_per_step, self._max_staleness, self._first_step = groups_per_step, max_staleness, first_step
        self._changed = asyncio.Condition()
        self._serves: dict[str, int] = {}
        self._num_admitted, self._closed = first_step * groups_per_step, False
        self._made: dict[int, int] = {}
        """Version of the oldest token of each group that is made and not taken."""
        self.taken: dict[int, list[int]] = {}
        """Groups of each step's batch."""
        self.staleness: list[int] = []
        self.trained_steps: list[int] = []
        self.published_steps: list[int] = []
        self.pulls: list[tuple[str, int]] = []

    async def add_replica(self, replica: str, step: int) -> None:
        self._serves[replica] = step

    async def admit(self, replica: str, max_groups: int) -> list[FakeAdmission]:
        await self._until(lambda: self._closed or self._room(replica) > 0, f"room for {replica}")
        if self._closed:
            return []
        first, number = self._num_admitted, min(max_groups, self._room(replica))
        self._num_admitted += number
        ids = (PromptId(source="fake", epoch=0, index=index) for index in range(first, first + number))
        return [FakeAdmission(index=id.index, prompt_id=id) for id in ids]

    async def put(self, indices: Sequence[int], version: int) -> None:
        self._made.update(dict.fromkeys(indices, version))
        await self._notify()

    async def take(self, step: int) -> list[int]:
        await self.trained(step - 1)
        start = step * self._groups_per_step
        batch = list(range(start, start + self._groups_per_step))
        await self._until(lambda: all(index in self._made for index in batch), f"the batch of step {step}")
        self.staleness.append(step - min(self._made.pop(index) for index in batch))
        self.taken[step] = batch
        await self._notify()
        return batch

    async def trained(self, step: int) -> None:
        self.trained_steps += range(len(self.trained_steps) + self._first_step, step + 1)

    async def published(self, step: int) -> None:
        await self.trained(step - 1)
        self.published_steps.append(step)

    async def pulled(self, replica: str, step: int) -> None:
        self.pulls.append((replica, step))
        self._serves[replica] = step
        await self._notify()

    async def state(self) -> dict[str, float]:
        return {f"groups/{name}": 0 for name in ("admitted", "trained", "filtered", "failed", "expired", "cancelled")}

    async def set_max_staleness(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness

    async def why(self) -> str:
        return f"{len(self._made)} groups are made"

    async def close(self, reason: str) -> dict[str, float]:
        self._closed = True
        await self._notify()
        return await self.state()

    def _room(self, replica: str) -> int:
        """Groups that the replica may be given: (S + 1)·P, less those untaken and those of steps it has not pulled."""
        unpulled = self._num_admitted - self._serves[replica] * self._groups_per_step
        return (self._max_staleness + 1) * self._groups_per_step - unpulled

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, condition, what: str) -> None:
        async with self._changed:
            await within(
                self._changed.wait_for(condition), 5.0, who="The fake replay", waits_for=what, from_whom="the ring"
            )


class FakeLearnerMesh:
    """All learner ranks as one: takes batches from the fake replay; `fail_at` makes that step raise."""

    def __init__(self, replay: FakeReplay, fail_at: int | None = None, version: PolicyVersion | None = None) -> None:
        self._replay, self._fail_at = replay, fail_at
        self.version = version or PolicyVersion()
        self._snapshots: set[PolicyVersion] = set()
        self.store: list[PolicyVersion] = []
        """Readable versions."""
        self.retired: list[PolicyVersion] = []
        """By calls of their own."""
        self.retired_with_commit: list[PolicyVersion] = []
        self.deltas = False
        """Whether versions after the first are deltas to it."""
        self.restaged: list[PolicyVersion] = []

    async def step(self, step: int, snapshot: bool) -> list[LearnerStep]:
        assert step == self.version.step
        batch = await self._replay.take(step)
        if step == self._fail_at:
            raise NonFiniteError(f"Step {step}: loss=nan.")
        await asyncio.sleep(0)
        self.version = self.version.next()
        if snapshot:
            self._snapshots.add(self.version)
        return [learner_step(self.version, batch)]

    async def snapshot(self) -> PolicyVersion:
        self._snapshots.add(self.version)
        return self.version

    async def stage(self, version: PolicyVersion) -> None:
        self._snapshots.remove(version)

    async def restage(self, version: PolicyVersion) -> None:
        self.restaged.append(version)

    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        whole = version in self.restaged or not self.deltas or not self.store
        self.store = [*(each for each in self.store if each != version), version]
        for old in retire:
            self.store.remove(old)
            self.retired_with_commit.append(old)
        if whole:
            return Committed(num_bytes=8)
        return Committed(num_bytes=2, needs=frozenset(self.store[:1]), num_elements=4, num_changed=1)

    async def retire(self, version: PolicyVersion) -> None:
        self.store.remove(version)
        self.retired.append(version)

    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.zeros(len(ids) - 1, dtype=np.float32) for ids in token_ids]

    async def save(self, folder: str) -> None:
        Path(folder).mkdir(parents=True)  # noqa: ASYNC240

    async def save_state(self, folder: str) -> None:
        Path(folder).mkdir()  # noqa: ASYNC240

    async def digest(self) -> str:
        return "0" * 64


class FakeReplica:
    """A replica that pulls at once from the fake learner's store; from `fail_at` on its pulls raise."""

    def __init__(self, name: str, learner: FakeLearnerMesh | None = None, fail_at: int | None = None) -> None:
        self.name = name
        self.version: PolicyVersion | None = None
        self._learner, self._fail_at = learner, fail_at

    async def pull(self, version: PolicyVersion) -> Pull:
        if self._fail_at is not None and version.step >= self._fail_at:
            raise PolicyError(f"{self.name} cannot pull {version}.")
        for _ in range(3):
            assert self._learner is None or version in self._learner.store, f"{version} was retired while it was read"
            await asyncio.sleep(0)
        self.version = version
        return make_pull(version)

    async def stats(self) -> ReplicaStats:
        await asyncio.sleep(0)
        return ReplicaStats(service=ServiceStats(tokens=5, busy_s=0.01), kv_usage=0.5, rss_bytes=100, cpu_s=1.0)

    async def score(self, token_ids: np.ndarray) -> tuple[PolicyVersion, np.ndarray]:
        assert self.version is not None
        return self.version, np.zeros(len(token_ids) - 1, dtype=np.float32)


class FakeWorkers:
    """Makes groups on fake replicas; `fail_at` makes the group of that index raise."""

    def __init__(self, replay: FakeReplay, replicas: Sequence[FakeReplica], fail_at: int | None = None) -> None:
        self._replay, self._fail_at = replay, fail_at
        self._replicas = {replica.name: replica for replica in replicas}
        self.made: list[int] = []

    async def make(self, admissions: Sequence[FakeAdmission], replica: str) -> list[GroupRecord]:
        version = self._replicas[replica].version
        assert version is not None
        await asyncio.sleep(0)
        indices = [admission.index for admission in admissions]
        if self._fail_at in indices:
            raise PolicyError(f"Group {self._fail_at} cannot be made.")
        await self._replay.put(indices, version.step)
        self.made += indices
        return [group_record(index, replica, (version.step, version.step)) for index in indices]

    async def evaluate(self, num_prompts: int, replica: str, name: str) -> EvalScores | None:
        return eval_scores(0.25)

    async def stats(self) -> list[WorkerReport]:
        await asyncio.sleep(0)
        return [WorkerReport(score_s=0.01, spans=(), rss_bytes=50, cpu_s=0.5)]


def group_record(index: int, replica: str = "policy_0", versions: tuple[int, int] = (0, 0), outcome: str = ""):
    """What the controller learns of a group."""
    return GroupRecord(
        index=index, prompt_id=f"fake:0:{index}", replica=replica, outcome=outcome,
        reason="zero_variance" if outcome else "", generated_s=1.0, scored_s=2.0,
        num_tokens=10, completion_tokens=6, versions=versions, reward_mean=0.5, prompt=f"p{index}", completion="c",
        reward=1.0,
    )  # fmt: skip


def make_pull(version: PolicyVersion, fetch_s: float = 0.2, pause_s: float = 0.1) -> Pull:
    """A pull of 8 bytes."""
    return Pull(version=version, fetch_s=fetch_s, pause_s=pause_s, num_bytes=8, held_bytes=8, started_s=1.0)


def learner_step(version: PolicyVersion, batch: Sequence[int]) -> LearnerStep:
    """What rank 0 tells of a step over the groups `batch`, with the replay actor's record of it."""
    counted = ("trained", "filtered", "failed", "expired", "cancelled", "requeued", "stale", "late")
    record: dict[str, Any] = {f"groups/{name}": 0 for name in counted}
    record |= dict.fromkeys(
        ("reward/mean", "reward/std", "staleness/max", "staleness/mean", "staleness/p90", "queue/depth",
         "queue/capacity", "queue/tokens"), 1.0
    )  # fmt: skip
    return LearnerStep(
        result=step_result(version=version, loss=0.5, num_loss_tokens=7, num_row_tokens=12, num_sample_tokens=9),
        batch=record | {"indices": list(batch), "taken_s": 3.0},
        wait_data_s=0.1,
        snapshot_s=0.01,
        snapshot_bytes=8,
        spans=(("train", "work", 1.0, 0.5, None),),
        rss_bytes=200,
        cpu_s=2.0,
    )
