"""One learner rank: takes its share of a batch from the replay actor, steps, publishes its shards."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forge_async.actors.forge_actor import ActorHandle, ForgeActor, concurrent_endpoint
from forge_async.core.errors import ForgeError, LearnerError, one_sentence
from forge_async.core.records import Samples
from forge_async.core.user_code import absolute_reference
from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share, split_samples
from forge_async.learner.layout import Layout
from forge_async.learner.ports import StepResult
from forge_async.learner.settings import (
    CorrectionSettings,
    LearnerSettings,
    LoraSettings,
    ObjectiveSettings,
    OptimizerSettings,
)
from forge_async.observe.process_stats import own_stats
from forge_async.pipeline.batch_ahead import BatchAhead
from forge_async.pipeline.ports import LearnerStep, Span, Spans
from forge_async.weights.manifest import Probe
from forge_async.weights.retention import Committed
from forge_async.weights.snapshots import Copy, Snapshots
from forge_async.weights.store_end import StoreEnd

if TYPE_CHECKING:
    from forge_async.backends.broadcast_ends import Sending
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.config import Config

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """All that a learner rank is built from."""

    model_folder: str
    total_steps: int
    """Of the run, and so of the learning-rate schedule."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    objective: ObjectiveSettings | None = field(default_factory=ObjectiveSettings)
    """None trains by cross-entropy on demonstrations."""
    correction: str = "token_is"
    """As `async.correction`."""
    correction_settings: CorrectionSettings = field(default_factory=CorrectionSettings)
    seed: int = 0
    temperature: float = 1.0
    """The sampler's."""
    publish_dtype: str = "float32"
    """The policy engine's dtype."""
    version: PolicyVersion = field(default_factory=PolicyVersion)
    """What the learner begins with."""
    state_folder: str = ""
    """Checkpoint that `version` is read from; empty: it is the model folder's."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Of rank 0: the model itself is trained."""
    merge_adapters: bool = False
    """As `weights.merge_adapters`."""
    takes_ahead: bool = True
    """Whether the batch of a step is taken while the step before it trains."""
    reads_frozen: bool = True
    """Whether reference and teacher are on the learner's mesh; without, what they give comes with the samples."""
    keeps_last: bool = False
    """Whether what was published last is kept, to be published again should the store die."""
    probe_tokens: int = 0
    """Longest probe that travels with each version, in tokens, for engines that are quantised; 0: none does."""

    @classmethod
    def of(cls, config: Config, model_folder: str) -> LearnerPlan:
        """What a run's configuration asks for."""
        objective = config.whole_objective()
        return cls(
            model_folder=model_folder,
            total_steps=config.root.steps,
            learner=config.learner,
            optimizer=config.optimizer,
            objective=replace(
                objective,
                name=absolute_reference(objective.name),
                teacher=str(Path(objective.teacher).absolute()) if objective.teacher else "",
            ),
            correction=config.asynchrony.correction,
            correction_settings=config.correction,
            seed=config.root.seed,
            temperature=config.sampling.temperature,
            publish_dtype=config.policy.dtype,
            lora=config.lora,
            merge_adapters=config.weights.merge_adapters,
            takes_ahead=config.asynchrony.takes_ahead,
            reads_frozen=not config.reference.is_service,
            keeps_last=config.weights.restarts > 0,
            probe_tokens=config.probe_tokens(),
        )


class LearnerActor(ForgeActor):
    """Rank of an SPMD mesh. Torch work runs on one thread, so that the actor stays free to publish meanwhile.

    A second thread does nothing but copy parameters out, beside the next forward and backward pass.
    """

    def __init__(self, plan: LearnerPlan, store: ActorHandle | None = None) -> None:
        """With a store, `publish` puts snapshots there; without, `connect` says where they go."""
        self._plan, self._store = plan, store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy-out")
        self._copied: list[Span] = []
        """Copies that have ended since the last step told of them."""
        self._learner: TitanLearner | None = None
        self._end: StoreEnd | None = None
        """Of the weight store that it publishes to."""
        self._replay: ActorHandle | None = None
        self._batches = BatchAhead(self._take_share, end=plan.total_steps if plan.takes_ahead else 0)
        self._snapshots = Snapshots(keeps_last=plan.keeps_last)
        self._probe_ids: np.ndarray | None = None
        """int32 [T], the probe's text, where one is wanted."""
        self._spare: Any = None
        """Memory for the next snapshot, the store's or an older one's, asked for while the step runs."""
        self._sendings: list[Sending] = []
        """Broadcasts that have ended since the last step was told of."""

    async def setup(self) -> None:
        await self._run(self._build)
        if self._store is not None:
            await self._join(await self._store.handle.call_one())

    async def teardown(self) -> None:
        self._batches.close()
        if self._learner is not None:
            await self._run(self._learner.close)

    @concurrent_endpoint
    async def connect(self, store_handle: bytes, replay: ActorHandle) -> PolicyVersion:
        """Join the weight store and the replay actor; returns the version of the loaded model."""
        await self._join(store_handle)
        self._replay = replay
        return self._rank.version

    @concurrent_endpoint
    async def join(self, store_handle: bytes, store: ActorHandle | None = None) -> None:
        """Leave the weight store, which is dead, for another, and publish there from now on. Call on all ranks.

        `store` is its actor, for a learner that was given one.
        """
        self._store = store or self._store
        await self._join(store_handle)

    @concurrent_endpoint
    async def step(self, step: int, snapshot: bool, deadline_s: float) -> LearnerStep:
        """Take the batch of `step`, train on this rank's share, and have the parameters copied out if `snapshot`.

        The copy goes on beside the next step, which waits for it before its optimiser changes what is copied.
        """
        learner, begun = self._rank, time.time()
        share, batch = await self._batches.take(step, deadline_s)
        taken = time.time()
        result, _ = await asyncio.gather(self._run(lambda: learner.train(share)), self._reserve(snapshot))
        trained = time.time()
        if snapshot:
            await self._snapshot()
        ended = time.time()
        own = own_stats()
        spans: Spans = (
            ("wait for batch", "wait", begun, taken - begun, None),
            ("train", "work", taken, trained - taken, None),
        )
        copied, self._copied = self._copied, []
        sent = self._take_sendings()
        return LearnerStep(
            result=result,
            batch=batch,
            wait_data_s=taken - begun,
            snapshot_s=ended - trained,
            snapshot_bytes=len(self._snapshots) * learner.snapshot_bytes,
            spans=(*spans, *copied, *_spans_of(sent)),
            rss_bytes=own.rss_bytes,
            cpu_s=own.cpu_s,
            broken_broadcasts=tuple(each.failure for each in sent if each.failure),
        )

    @concurrent_endpoint
    async def train(self, samples: Samples) -> StepResult:
        """Train on this rank's share of `samples`, which every rank is given whole. Call on all ranks."""
        learner = self._rank
        share = split_samples(samples, learner.batch_ranks, Layout.of(self._plan.learner))[learner.batch_rank]
        return await self._run(lambda: learner.train(share))

    @concurrent_endpoint
    async def snapshot(self) -> PolicyVersion:
        """Copy out the parameters as they are, to be staged; returns their version."""
        await self._reserve(True)
        version = await self._snapshot()
        await asyncio.wrap_future(self._snapshots.waiting(version))
        return version

    @concurrent_endpoint
    async def stage(self, version: PolicyVersion) -> None:
        """Put this rank's shards of a snapshot into the store. Call on all ranks.

        What was staged last may be staged again, in another store. With one rank it need not be called: `commit` puts
        shards and manifest in one call to the store.
        """
        await self._weights.stage(version)

    @concurrent_endpoint
    async def publish(self, version: PolicyVersion, keep_versions: int = 2) -> None:
        """Make a snapshot readable to every policy, and delete all but the newest `keep_versions` versions.

        Call on all ranks of a learner that was given a store, for one version after the other. The next step may be
        trained meanwhile.
        """
        if self._store is None:
            raise LearnerError("The learner has no store to publish to: start it as LearnerActor(plan, store).")
        end = self._weights
        await end.stage(version)
        rank = self._rank.rank
        await self._store.meet.call_one(str(version), rank, self._plan.learner.ranks)
        if rank != 0:
            return
        await end.commit(version)
        await end.plane.retire_all_but(keep_versions)

    @concurrent_endpoint
    async def restage(self, version: PolicyVersion) -> None:
        """Stage whole what was staged last, beside its delta. Call on all ranks; then commit it again."""
        await self._weights.plane.restage(version)

    @concurrent_endpoint
    async def commit(self, version: PolicyVersion, retire: Sequence[PolicyVersion] = ()) -> Committed:
        """Make a version readable, after every rank has staged it, then delete those of `retire`.

        Called on one rank; the only one stages it too.
        """
        manifest = await self._weights.commit(version, retire)
        return Committed(
            num_bytes=manifest.stored_bytes,
            needs=manifest.needs,
            num_elements=sum(coding.num_elements for coding in manifest.codings),
            num_changed=sum(coding.num_changed for coding in manifest.codings),
        )

    @concurrent_endpoint
    async def retire(self, version: PolicyVersion) -> None:
        """Delete a version from the store. Called on one rank."""
        await self._weights.plane.retire(version)

    @concurrent_endpoint
    async def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        """float32 [T - 1] for each sequence: log-probability of each token after the first. Call on all ranks."""
        return await self._run(lambda: self._rank.score(token_ids))

    @concurrent_endpoint
    async def save(self, folder: str) -> None:
        """Write a Hugging Face folder. Call on all ranks."""
        await self._run(lambda: self._rank.save(Path(folder)))

    @concurrent_endpoint
    async def save_state(self, folder: str) -> None:
        """Write what a learner needs to go on from here. Call on all ranks."""
        await self._run(lambda: self._rank.save_state(Path(folder)))

    @concurrent_endpoint
    async def digest(self) -> str:
        """sha256 of the parameters. Call on all ranks."""
        return await self._run(self._rank.digest)

    @property
    def _rank(self) -> TitanLearner:
        if self._learner is None:
            raise LearnerError("The learner is not set up.")
        return self._learner

    @property
    def _weights(self) -> StoreEnd:
        if self._end is None:
            raise LearnerError("The learner is not connected to the weight store.")
        return self._end

    async def _take_share(self, step: int, deadline_s: float) -> tuple[Share, dict[str, Any]]:
        if self._replay is None:
            raise LearnerError("The learner is not connected to the replay actor.")
        rank, take = self._rank, self._replay.take_share
        return await take.call_one(step, rank.batch_rank, rank.batch_ranks, deadline_s, rank.version.step)

    async def _join(self, store_handle: bytes) -> None:
        from forge_async.backends.weight_stores import open_plane, open_writing_plane

        old, alone = self._end, self._plan.lora.rank > 0 and not self._plan.merge_adapters
        # Versions of adapters are small as they are.
        plane = (open_plane if alone else open_writing_plane)(store_handle, self._sendings.append)
        whole = (lambda packed: self._run(lambda: self._rank.whole(*packed))) if alone else None
        self._end = StoreEnd(plane, self._snapshots, num_ranks=self._plan.learner.ranks, whole=whole)
        self._spare = None  # the old store's
        self._rank.forget_base()  # this store has none of it
        if old is not None:
            await old.close()

    def _take_sendings(self) -> list[Sending]:
        """The broadcasts that ended since the last call. They ran beside the step, on another thread."""
        sendings = self._sendings[:]
        del self._sendings[: len(sendings)]
        return sendings

    async def _reserve(self, wanted: bool) -> None:
        """Ask for memory of the size of the last snapshot, unless some is at hand.

        Without it, because the store does not answer, a snapshot takes memory of its own: to publish it is what fails.
        """
        num_bytes = self._rank.snapshot_bytes
        if not wanted or self._end is None or not num_bytes or self._spare is not None:
            return
        try:
            self._spare = await self._end.plane.memory(num_bytes)
        except ForgeError as error:
            log.warning("no memory of the store for a snapshot: %s", one_sentence(error))

    async def _snapshot(self) -> PolicyVersion:
        blob, self._spare = self._spare, None
        begun_s = time.time()
        version, probe, copy = await self._run(lambda: self._begin_snapshot(blob))
        copy.add_done_callback(
            lambda _: self._copied.append(("snapshot", "work", begun_s, time.time() - begun_s, None))
        )
        self._snapshots.add(version, copy, probe)
        return version

    def _begin_snapshot(self, blob: Any) -> tuple[PolicyVersion, Probe | None, Copy]:
        """The version of the parameters as they are, its probe where one is wanted, and the copy that has begun.

        One piece of work for the learner's thread: nothing comes in between, on this rank or another, which computes
        the probe together with it.
        """
        probe = None if self._probe_ids is None else self._probe(self._probe_ids)
        return self._rank.version, probe, self._rank.begin_snapshot(self._copier, blob)

    def _probe(self, ids: np.ndarray) -> Probe:
        (logprobs,) = self._rank.score([ids], temperature=1.0)  # an engine's score knows no other
        return Probe(token_ids=tuple(ids.tolist()), logprobs=tuple(logprobs.tolist()))

    def _build(self) -> None:
        from forge_async.backends.parity import probe_ids
        from forge_async.backends.titan_learner import TitanLearner
        from forge_async.learner.loss import objective_loss, supervised_loss

        plan = self._plan
        if plan.objective is None:
            loss = supervised_loss()
        else:
            loss = objective_loss(plan.objective, plan.correction, plan.correction_settings)
        self._learner = TitanLearner(
            Path(plan.model_folder),
            loss=loss,
            learner=plan.learner,
            optimizer=plan.optimizer,
            total_steps=plan.total_steps,
            seed=plan.seed,
            temperature=plan.temperature,
            publish_dtype=plan.publish_dtype,
            version=plan.version,
            lora=plan.lora,
            merge_adapters=plan.merge_adapters,
            reads_frozen=plan.reads_frozen,
        )
        if plan.probe_tokens:
            self._probe_ids = probe_ids(Path(plan.model_folder), plan.probe_tokens)
        if plan.state_folder:
            self._learner.restore(Path(plan.state_folder), plan.version)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _spans_of(sendings: Sequence[Sending]) -> Spans:
    return tuple(
        (
            "broadcast",
            "work",
            each.started_s,
            each.duration_s,
            {"key": each.key, "bytes": each.num_bytes, "readers": each.num_members},
        )
        for each in sendings
    )
