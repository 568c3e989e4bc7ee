"""One policy replica: a vLLM engine behind the request service, pulling its own weights."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_async.actors.engine_ranks import OwnRanks
from forge_async.actors.forge_actor import ActorHandle, ForgeActor, Hosts, concurrent_endpoint
from forge_async.core.clock import within
from forge_async.core.compact import Records
from forge_async.core.errors import PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.learner.settings import LoraSettings
from forge_async.observe.process_stats import own_stats
from forge_async.pipeline.ports import Pull, ReplicaStats
from forge_async.policy.concurrency import concurrency_limit
from forge_async.policy.local import LocalPolicy
from forge_async.policy.ports import Engine, GenerationRequest, GenerationResult
from forge_async.policy.service import RequestService
from forge_async.policy.settings import PolicySettings
from forge_async.weights.manifest import Manifest
from forge_async.weights.packing import Unpacker
from forge_async.weights.probe import ProbeCheck, probe_of
from forge_async.weights.reading import check_served, reading_weights
from forge_async.weights.settings import WeightsSettings

if TYPE_CHECKING:
    from forge_async.weights.plane import WeightPlane
    from forge_async.weights.records import ReadReport


log = logging.getLogger(__name__)

LAST_WORDS_S = 0.5
"""Between the news of a rank's death and the end of its replica, for the answers to leave."""


class PolicyActor(ForgeActor):
    """Serves tokens of the newest version that it has pulled whole."""

    def __init__(
        self,
        name: str,
        model_folder: str,
        policy: PolicySettings | None = None,
        weights: WeightsSettings | None = None,
        start_version: PolicyVersion | None = None,
        seed: int = 0,
        store: ActorHandle | None = None,
        swap: str = "keep_kv",
        lora: LoraSettings | None = None,
        adapters_held: int = 1,
        hosts: Hosts | None = None,
    ) -> None:
        """With a store, it begins with the newest version that is readable there; without, `connect` and `pull`.

        Args:
            hosts: where the ranks of its engine run, if there are several, and what their processes get; None: here.
            swap: what happens to requests in flight when weights arrive, a name of `policy.swap.MODES`.
            lora: the adapters that versions hold, if they hold adapters.
            adapters_held: so many of them the engine holds at once.
        """
        self._name, self._model_folder = name, model_folder
        self._policy, self._weights = policy or PolicySettings(), weights or WeightsSettings()
        self._start_version, self._seed = start_version or PolicyVersion(), seed
        self._store, self._lora, self._adapters_held = store, lora, adapters_held
        self._base = ""
        """The version whose parameters lie below the adapters that are served; "" while there is none."""
        self._pulled: Pull | None = None
        """How the version that is served arrived; None while the engine's weights mean nothing."""
        self._catching_up = asyncio.Lock()
        limit = concurrency_limit(self._policy.concurrency, self._policy.max_sequences)
        self._service = RequestService(self._build_engine, swap=swap, limit=limit)
        self._client = LocalPolicy(self._service, name)
        self._plane: WeightPlane | None = None
        self._unpacker = Unpacker(shared=False)
        self._probe = ProbeCheck(name, self._weights.probe_limit)
        self._probe_gap: float | None = None
        """Of the version that is served, where its engine is compared by the probe."""
        self._hosts = hosts
        self._ranks: OwnRanks | None = None
        """The processes that hold the engine's model together; None when this one holds all of it."""
        self._watching: asyncio.Task[None] | None = None
        self._built: dict[str, float] = {}
        self._num_preemptions = 0
        """Of the engine, when `stats` was last asked."""

    async def setup(self) -> None:
        if self._policy.tensor_parallel > 1:
            gpus = tuple(int(each) for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each)
            own = gpus[: self._policy.tensor_parallel]
            self._ranks = await OwnRanks.start(self._name, self._policy, self._hosts, own, self._weights.gpus)
            self._watching = asyncio.create_task(self._end_with_ranks(self._ranks.handle))
        await self._service.start()
        if self._store is not None:
            await self._join(await self._store.handle.call_one())
            await self._catch_up()

    async def teardown(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._service.close()
        if self._ranks is not None:
            await self._ranks.close()

    @concurrent_endpoint
    async def connect(self, store_handle: bytes) -> dict[str, float]:
        """Join the weight store; returns how long the parts of the start took, in seconds by name.

        Called again it leaves that store, which is dead, for another: what is read from the old one fails, and what is
        served stays.
        """
        await self._join(store_handle)
        return self._built

    @concurrent_endpoint
    async def ranks(self) -> ActorHandle | None:
        """The ranks of its engine, to be watched; None when it has just one, which is this process."""
        return None if self._ranks is None else self._ranks.handle

    @concurrent_endpoint
    async def generate(self, requests: Sequence[GenerationRequest], min_step: int = 0) -> list[GenerationResult]:
        """Complete requests that belong together; returns when all are done, in their order.

        Args:
            min_step: no token comes from a version below it (Law 4; of the groups' admissions). A replica that is
                behind, because it was started anew, first pulls the newest version.
        """
        async with self._catching_up:
            if self._is_behind(min_step):
                await self._catch_up()
        if self._is_behind(min_step):
            raise PolicyError(
                f"{self._name} serves {self._served or 'no version yet'}, but version {min_step} is asked for: publish "
                "it, and have the policy pull it, before prompts are admitted."
            )
        return Records(await self._service.generate(requests))

    @concurrent_endpoint
    async def submit(
        self, ticket: str, requests: Sequence[GenerationRequest], linger_s: float
    ) -> tuple[list[GenerationResult], bool]:
        """Queue requests that belong together, and return the first that finish, as `collect` does.

        `ticket` is what its sender calls the submission from here on, unlike any other's.
        """
        results, done = await self._client.submit(ticket, requests, linger_s)
        return Records(results), done

    @concurrent_endpoint
    async def collect(self, ticket: str, linger_s: float) -> tuple[list[GenerationResult], bool]:
        """Finished requests of a ticket (one, and more that come within `linger_s`), and whether none is left."""
        results, done = await self._client.collect(ticket, linger_s)
        return Records(results), done

    @concurrent_endpoint
    async def cut(self, ticket: str, ids: Sequence[str] | None = None) -> list[GenerationResult]:
        """End the unfinished requests of a ticket now, or those of `ids`; returns what was not yet collected of them.

        Finished rows are whole, unfinished ones as far as they came and marked as cut; a request that carries such a
        result as its prefix goes on from there, on any replica. A `collect` that still waits returns without them.
        """
        return await self._client.cut(ticket, ids)

    @concurrent_endpoint
    async def pull(self, version: PolicyVersion) -> Pull:
        """Fetch a version and swap it in between two engine steps, requests in flight or not.

        A version older than the one that is served is superseded: nothing is done, and what is returned names the
        version that is served.

        Raises WeightsError when it cannot be read whole (the replica goes on with what it has), FingerprintError when
        what it would serve is not what was published: that replica serves nothing any more.
        """
        return await self._pull(version)

    @concurrent_endpoint
    async def score(self, token_ids: np.ndarray) -> tuple[PolicyVersion, np.ndarray]:
        """The served version, and float32 [T - 1], its log-probability of each token after the first."""
        return await self._service.between_steps(lambda engine: (engine.version, engine.score(token_ids)))

    @concurrent_endpoint
    async def stats(self) -> ReplicaStats:
        """What happened since the last call."""
        state, own = await self._service.state(), own_stats()
        occupancy = state.occupancy
        preempted, self._num_preemptions = occupancy.num_preemptions - self._num_preemptions, occupancy.num_preemptions
        return ReplicaStats(
            service=self._service.take_stats(),
            kv_usage=occupancy.kv_usage,
            rss_bytes=own.rss_bytes,
            cpu_s=own.cpu_s,
            num_running=occupancy.num_running,
            num_waiting=occupancy.num_waiting,
            num_queued=state.num_queued,
            limit_sequences=state.limit_sequences,
            num_preemptions=preempted,
        )

    async def _join(self, store_handle: bytes) -> None:
        from forge_async.backends.weight_stores import open_plane

        if self._ranks is not None:
            await self._ranks.connect(store_handle)
        old, self._plane = self._plane, open_plane(store_handle)
        self._unpacker = Unpacker(shared=self._plane.store.transport.is_shared)
        if old is not None:
            await old.store.close()

    @property
    def _served(self) -> PolicyVersion | None:
        return None if self._pulled is None else self._pulled.version

    def _is_behind(self, min_step: int) -> bool:
        return self._served is None or self._served.step < min_step

    async def _catch_up(self) -> None:
        """Pull the newest readable version, if there is one."""
        if versions := await self._connected.versions():
            await self._pull(versions[-1])

    @property
    def _connected(self) -> WeightPlane:
        if self._plane is None:
            raise PolicyError(f"{self._name} is not connected to the weight store.")
        return self._plane

    async def _pull(self, version: PolicyVersion) -> Pull:
        return await within(
            self._pull_now(version),
            self._weights.timeout_s,
            who=self._name,
            waits_for=f"{version}, or for the requests in flight to make way for it,",
            from_whom="the weight store",
        )

    async def _pull_now(self, version: PolicyVersion) -> Pull:
        started_s, begun = time.time(), time.perf_counter()
        # One pull at a time, which the service sees to: they unpack into the same memory.
        async with self._service.pulling():
            if self._pulled is not None and version.precedes(self._pulled.version):
                log.warning("%s goes on with %s: %s is older.", self._name, self._pulled.version, version)
                return self._pulled.without_cost(started_s)
            async with self._fetched(version) as (weights, manifests, read):
                ready = None if weights is None else await self._service.prepare(weights, version)
                fetch_s = time.perf_counter() - begun
                swap = await self._service.swap(ready, version, self._fingerprint_check(manifests))
            self._base = manifests[0].base or str(version)
            self._pulled = Pull(
                version=version,
                fetch_s=fetch_s,
                pause_s=swap.pause_s,
                num_bytes=read.num_bytes,
                held_bytes=read.own_bytes + _quantized_bytes(weights, ready),
                started_s=started_s,
                swap=swap,
                transport=read.transport,
                damage=read.damage,
                probe_gap=self._probe_gap,
            )
            return self._pulled

    @asynccontextmanager
    async def _fetched(
        self, version: PolicyVersion
    ) -> AsyncIterator[tuple[dict[str, Any] | None, Sequence[Manifest], ReadReport]]:
        """A version's weights, None when the engine's ranks have them, its manifest and what it took."""
        plane = self._connected
        if self._ranks is not None:
            async with self._ranks.fetched(version, plane) as (manifest, read):
                yield None, [manifest], read
            return
        async with reading_weights(plane, self._unpacker, version, self._base) as (weights, manifests, read):
            cut = sum(shard.num_bytes for each in manifests for shard in each.shards if not shard.is_whole)
            yield weights, manifests, dataclasses.replace(read, own_bytes=read.own_bytes + cut)

    async def _end_with_ranks(self, ranks: ActorHandle) -> None:
        """When a rank dies, tell all who wait, then end: a replica lives and dies as one."""
        error = await ranks.watch.wait_for_death()
        log.error("%s ends: %s", self._name, error)
        self._service.fail(error)
        await asyncio.sleep(LAST_WORDS_S)
        os._exit(1)

    def _fingerprint_check(self, manifests: Sequence[Manifest]) -> Callable[[Engine], None] | None:
        verify = self._weights.verify

        def check(engine: Engine) -> None:
            check_served(manifests, engine, self._name, verify)
            if engine.sealed:
                tokens = np.array(probe_of(manifests[0], self._name).token_ids, dtype=np.int32)
                self._probe_gap = self._probe.look(manifests[0], engine.score(tokens))

        return None if verify == "none" else check

    def _build_engine(self) -> Engine:
        from forge_async.backends.vllm_engine import VllmEngine

        engine = VllmEngine(
            self._model_folder,
            self._policy,
            self._start_version,
            self._seed,
            ranks=self._ranks,
            lora=self._lora,
            adapters_held=self._adapters_held,
        )
        self._built = {"import_s": engine.import_s, "build_s": engine.build_s}
        return engine


def _quantized_bytes(weights: Mapping[str, Any] | None, ready: Mapping[str, Any] | None) -> int:
    """What a version's quantised weights take beside those that are served: a byte a number, scales left out."""
    return sum(weights[name].numel() for name in weights.keys() - ready.keys()) if weights and ready else 0
