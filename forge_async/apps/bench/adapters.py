"""`bench adapters`: what a version weighs and how long it stops an engine, as a whole model and as adapters on it.

A real learner, store and replica, in turn for each case. Every version follows a step on a few random samples, and is
pulled while the replica generates. `--config smollm2_cpu` takes SmolLM2 in place of the tiny model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from forge_async.actors.forge_actor import ActorHandle
from forge_async.actors.learner_actor import LearnerActor, LearnerPlan
from forge_async.actors.policy_actor import PolicyActor
from forge_async.actors.store_actor import StoreActor
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan
from forge_async.config import Config
from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED, PolicyVersion, VersionRuns
from forge_async.learner.settings import LORA_TARGETS
from forge_async.pipeline.ports import Pull
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.runtime.meshes import Placement, close_monarch

RANK = 8
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "adapters/attention": {"learner.lora.rank": RANK},
    "adapters/all_linear": {"learner.lora.rank": RANK, "learner.lora.targets": list(LORA_TARGETS)},
    "merged/attention": {"learner.lora.rank": RANK, "weights.merge_adapters": True},
}
"""Name -> the keys that differ from the user's."""
SEQUENCES, PROMPT_TOKENS, NEW_TOKENS = 16, 16, 32
"""What the replica is asked for while versions arrive."""
TIMEOUT_S = 600.0


def measure(plan: Plan) -> Report:
    """Run each case with `plan.rounds` versions after the first."""
    folder = plan.model_folder()
    rows = asyncio.run(_measure(plan, folder))
    return Report(bench="adapters", rows=[_with_share(row, rows[0]) for row in rows], notes=NOTES)


async def _measure(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    try:
        for case, changes in CASES.items():
            print(case, flush=True)
            rows.append(await _case(case, plan.config.replace(changes), plan, folder))
    finally:
        await close_monarch()
    return rows


async def _case(case: str, config: Config, plan: Plan, folder: Path) -> dict[str, Any]:
    placement = await Placement.start(config.job, plan.folder / case.replace("/", "-"))
    try:
        ring = await Ring.start(config, placement, folder, plan.rounds)
        first, _ = await ring.version()
        without_pull = await ring.tokens_per_s()
        timings = [await ring.version(step=True) for _ in range(plan.rounds)]
    finally:
        await placement.stop()
    pulls = [pull for pull, _ in timings]
    return {
        "case": case,
        "bytes": pulls[-1].num_bytes,
        "first_bytes": first.num_bytes,
        "publish_s": median(publish_s for _, publish_s in timings),
        "fetch_s": median(pull.fetch_s for pull in pulls),
        "pause_s": median(pull.pause_s for pull in pulls),
        "pause_max_s": max(pull.pause_s for pull in pulls),
        "in_flight": max(pull.swap.num_in_flight if pull.swap else 0 for pull in pulls),
        "tokens_per_s": without_pull,
        "versions": len(pulls),
    }


class Ring:
    """A learner, a store and a replica."""

    def __init__(self, learner: ActorHandle, policy: ActorHandle) -> None:
        self._learner, self._policy, self._seed = learner, policy, 0

    @classmethod
    async def start(cls, config: Config, placement: Placement, folder: Path, steps: int) -> Ring:
        """Start them, the learner and the replica together."""
        limits = {"start_timeout_s": config.run.start_timeout_s, "stop_timeout_s": config.run.stop_timeout_s}
        store = await StoreActor.options(mesh_name="store", hosts=placement.controller, **limits).as_actor(
            config.weights, str(placement.run_dir / "weights")
        )
        plan = LearnerPlan.of(config.replace({"steps": steps}), str(folder))
        learner = LearnerActor.options(
            mesh_name="learner", hosts=placement.learner, procs=config.learner.ranks, spmd=True, **limits
        )
        policy = PolicyActor.options(mesh_name="policy_0", hosts=placement.policy, **limits)
        arguments = ("policy_0", str(folder), config.policy, config.weights)
        return cls(
            *await asyncio.gather(
                learner.as_actor(plan, store),
                policy.as_actor(*arguments, store=store, lora=config.travelling_lora()),
            )
        )

    async def version(self, step: bool = False) -> tuple[Pull, float]:
        """Publish a version, after a step if asked for, and have it pulled while the replica generates.

        Returns how it arrived, and the seconds from the snapshot to its being readable.
        """
        if step:
            await self._learner.train.call(samples(self._seed), timeout_s=TIMEOUT_S)
        generating = asyncio.create_task(self._generate()) if step else None
        begun = time.perf_counter()
        version: PolicyVersion = (await self._learner.snapshot.call(timeout_s=TIMEOUT_S))[0]
        await self._learner.publish.call(version, timeout_s=TIMEOUT_S)
        publish_s = time.perf_counter() - begun
        pull = await self._policy.pull.call_one(version, timeout_s=TIMEOUT_S)
        if generating:
            await generating
        return pull, publish_s

    async def tokens_per_s(self) -> float:
        """Tokens a second while nothing else happens, at the second try."""
        await self._generate()
        begun = time.perf_counter()
        await self._generate()
        return SEQUENCES * NEW_TOKENS / (time.perf_counter() - begun)

    async def _generate(self) -> None:
        self._seed += 1
        sampling = Sampling(max_new_tokens=NEW_TOKENS)
        requests = [
            GenerationRequest(
                id=f"{self._seed}/{number}",
                prompt_token_ids=np.random.default_rng((self._seed, number)).integers(4, 90, PROMPT_TOKENS, np.int32),
                num_samples=1,
                seed=4096 * number,
                sampling=sampling,
            )
            for number in range(SEQUENCES)
        ]
        await self._policy.generate.call_one(requests, timeout_s=TIMEOUT_S)


def samples(seed: int) -> Samples:
    """A few samples of random tokens, to step on."""
    rng = np.random.default_rng(seed)
    count, length, given = 4, 16, 4
    mask = np.tile(np.arange(length) >= given, count)
    runs = ((given, NOT_SAMPLED, 0), (length - given, 0, 0))
    return Samples(
        lengths=np.full(count, length, dtype=np.int32),
        token_ids=rng.integers(4, 90, count * length).astype(np.int32),
        loss_mask=mask,
        logprobs=(-2.0 * mask).astype(np.float32),
        advantages=(mask * rng.choice([-1.0, 1.0], count * length)).astype(np.float32),
        versions=VersionRuns.of(run for _ in range(count) for run in runs),
    )


def _with_share(row: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "share_of_full": row["bytes"] / full["bytes"]}


NOTES = (
    f"Adapters of rank {RANK}, on q, k, v and o (attention) or on all seven linear layers of a block. bytes: of a "
    "version after the first, which is whole (first_bytes).",
    "publish: snapshot, digests, commit, and the end of older versions; fetch and pause as a replica measures them, "
    f"sampled comparison included, with {SEQUENCES} sequences decoding.",
    "tokens_per_s: without a pull. The replica of full and of merged versions computes without adapters.",
)
