"""`bench deltas`, and the `coding` rows of `bench weights`: what a version costs that holds only what changed.

- `coding/RATE`: one core codes and applies a delta of bfloat16 weights of which that share changed by a few units in
  the last place. The bound is the entropy of which elements changed, each at random at the measured rate, and of by how
  much.
- `smollm2/lr=LR/step=N`: SmolLM2-135M trained in float32 by AdamW, on English text with that learning rate, and
  published in bfloat16: what really changes, and what it costs.
- `TRANSPORT/DELTA`: a model of which 1.5% changes, from process to process, with `weights.delta` as named.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forge_async.actors.store_actor import StoreActor
from forge_async.apps.bench.delta_ends import DeltaEnd
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan, in_another_process
from forge_async.backends import smollm2
from forge_async.backends.only_rank import be_the_only_rank
from forge_async.core.records import Samples
from forge_async.learner.batch import split_samples
from forge_async.learner.settings import LearnerSettings, OptimizerSettings
from forge_async.rollout.demonstrations import demonstration_samples
from forge_async.runtime.meshes import Placement, close_monarch
from forge_async.weights.settings import WeightsSettings

if TYPE_CHECKING:
    import torch

    from forge_async.weights.manifest import Part

T = TypeVar("T")

RATES = (0.001, 0.015, 0.1)
"""Shares of changed elements."""
CODED_BYTES = 1 << 27
MOVED_BYTES = 1e8
MOVED_RATE = 0.015
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
NUM_STEPS = 3
SAMPLE_TOKENS, NUM_SAMPLES = 64, 4
LONGEST_TEXT = 20_000
"""Characters; a tokenizer warns of more tokens than its model can read at once."""
WAYS = (("shm", "never"), ("shm", "always"), ("rpc", "never"), ("rpc", "auto"), ("http", "never"), ("http", "auto"))
"""Transport and `weights.delta`."""


def measure(plan: Plan) -> Report:
    """Code, train, then move."""
    rows = coding_rows(plan)
    if smollm2.is_converted(smollm2.cached_folder()):
        for lr in LEARNING_RATES:
            rows += in_another_process(_trained_rows, smollm2.cached_folder(), lr, plan.config.root.seed)
            print(f"smollm2/lr={lr:g}: done", flush=True)
        notes = NOTES
    else:
        notes = (*NOTES, "SmolLM2 is left out: make it by `python -m forge_async.apps.model smollm2`.")
    rows += asyncio.run(_moved_rows(plan))
    return Report(bench="deltas", rows=rows, notes=notes)


def coding_rows(plan: Plan) -> list[Mapping[str, Any]]:
    """The `coding` rows, measured in a process of their own."""
    return in_another_process(_coding_rows, int(plan.num_bytes or CODED_BYTES), plan.rounds)


def entropy_bytes(old: np.ndarray, new: np.ndarray) -> float:
    """The fewest bytes that can tell `new` from `old`, uint16 [N] each, if elements change independently of each other.

    N H(p) bits for which elements changed, p their share, and for each of these the entropy of its step.
    """
    steps = (new - old)[new != old]
    if not len(steps):
        return 0.0
    _, counts = np.unique(steps, return_counts=True)
    share = len(steps) / len(old)
    return (len(old) * _entropy(np.array([share, 1 - share])) + len(steps) * _entropy(counts / len(steps))) / 8


def _entropy(shares: np.ndarray) -> float:
    """Bits."""
    positive = shares[shares > 0]
    return float(-(positive * np.log2(positive)).sum())


def changed_weights(num_bytes: int, rate: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bfloat16 [N]: normal weights, and the same where a share of them moved by a few units in the last place."""
    import torch

    rng = np.random.default_rng(seed)
    old = torch.randn(num_bytes // 2, generator=torch.Generator().manual_seed(seed)).bfloat16()
    places = np.flatnonzero(rng.random(old.numel(), dtype=np.float32) < rate)
    steps = rng.geometric(0.8, size=len(places)) * rng.choice([-1, 1], size=len(places))
    bits = old.view(torch.int16).numpy().copy()
    bits[places] += steps.astype(np.int16)
    return old, torch.from_numpy(bits).view(torch.bfloat16)


def _coding_rows(num_bytes: int, rounds: int) -> list[Mapping[str, Any]]:
    from forge_async.weights.packing import LocalShard, Packer

    rows = []
    for rate in RATES:
        old, new = changed_weights(num_bytes, rate, seed=0)
        (part, base), (_, blob) = (
            Packer(0).pack([LocalShard(name="w", tensor=each, global_shape=tuple(each.shape), offsets=(0,))])
            for each in (old, new)
        )
        rows.append({"case": f"coding/{rate:.1%}", **coded(part, base, blob, rounds)})
    return rows


def coded(part: Part, base: torch.Tensor, blob: torch.Tensor, rounds: int) -> dict[str, float]:
    """Figures of one delta of bfloat16 weights; rates are of the whole's bytes."""
    from forge_async.weights import delta

    most = 2 * part.blob_bytes
    encoded = [_timed(lambda: delta.encode(part, base, blob, most_bytes=most)) for _ in range(max(1, rounds))]
    found, held = encoded[0][1], [base.clone() for _ in encoded]
    assert found is not None, "it is less than twice the whole"
    stream = found.stream
    apply_s = [_timed(lambda each=each: delta.apply(part, each, stream))[0] for each in held]
    assert all(bool((each == blob).all()) for each in held), "the bits came back"
    bound = entropy_bytes(base.numpy().view(np.uint16), blob.numpy().view(np.uint16))
    return {
        "bytes": part.blob_bytes,
        "changed_fraction": found.num_changed / found.num_elements,
        "delta_bytes": stream.numel(),
        "times_smaller": part.blob_bytes / stream.numel(),
        "over_entropy_bound": stream.numel() / bound if bound else 0.0,
        "encode_gb_per_s": part.blob_bytes / median(took_s for took_s, _ in encoded) / 1e9,
        "apply_gb_per_s": part.blob_bytes / median(apply_s) / 1e9,
    }


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    begun = time.perf_counter()
    result = work()
    return time.perf_counter() - begun, result


def _trained_rows(folder: Path, lr: float, seed: int) -> list[Mapping[str, Any]]:
    """A row for each step of a run with one learning rate."""
    from forge_async.backends.hf_renderer import HfRenderer

    learner, texts = _learner(folder, lr, seed), batches(HfRenderer(str(folder)).encode)
    _, base = learner.snapshot()
    rows = []
    for number in range(NUM_STEPS):
        learner.train(split_samples(next(texts), 1)[0])
        part, blob = learner.snapshot()
        rows.append({"case": f"smollm2/lr={lr:g}/step={number + 1}", **coded(part, base, blob, rounds=1)})
        base = blob
    learner.close()
    return rows


def batches(encode: Callable[[str], np.ndarray]) -> Iterator[Samples]:
    """Batches of running English text: Python's own documentation, which every interpreter carries."""
    from pydoc_data.topics import topics

    names = [name for name in sorted(topics) if len(topics[name]) < LONGEST_TEXT][:40]
    tokens = np.concatenate([encode(topics[name]) for name in names])
    for start in range(0, len(tokens) - NUM_SAMPLES * SAMPLE_TOKENS, NUM_SAMPLES * SAMPLE_TOKENS):
        rows = tokens[start : start + NUM_SAMPLES * SAMPLE_TOKENS].reshape(NUM_SAMPLES, SAMPLE_TOKENS)
        yield demonstration_samples([row[:1] for row in rows], [row[1:] for row in rows])


def _learner(folder: Path, lr: float, seed: int) -> Any:
    be_the_only_rank()
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import supervised_loss

    return TitanLearner(
        folder,
        loss=supervised_loss(),
        learner=LearnerSettings(row_tokens=SAMPLE_TOKENS, micro_batch_tokens=NUM_SAMPLES * SAMPLE_TOKENS),
        optimizer=OptimizerSettings(lr=lr, warmup_steps=0),
        total_steps=NUM_STEPS,
        seed=seed,
        publish_dtype="bfloat16",
    )


async def _moved_rows(plan: Plan) -> list[Mapping[str, Any]]:
    placement = await Placement.start(plan.config.job, plan.folder)
    try:
        writer, reader = [
            await DeltaEnd.options(mesh_name=name, hosts=placement.controller).as_actor()
            for name in ("delta_writer", "delta_reader")
        ]
        rows = []
        for transport, delta in WAYS:
            settings = WeightsSettings(transport=transport, delta=delta, verify="none")
            store = await StoreActor.options(mesh_name="delta_store", hosts=placement.controller).as_actor(settings)
            handle = await store.handle.call_one()
            for end in (writer, reader):
                await end.join.call_one(handle, int(plan.num_bytes or MOVED_BYTES), MOVED_RATE)
            moved = [
                (await writer.publish.call_one(step), await reader.pull.call_one(step))
                for step in range(plan.rounds + 2)
            ][2:]
            rows.append({"case": f"{transport}/{delta}", **_medians(moved)})
            await store.shutdown()
        return rows
    finally:
        await placement.stop()
        await close_monarch()


def _medians(moved: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, float]:
    joined = [published | pulled for published, pulled in moved]
    return {name: median(each[name] for each in joined) for name in joined[0]}


NOTES = (
    "Rates are of the whole version's bytes a second, on one core.",
    "The first steps of AdamW move every weight by about the learning rate, later ones by less: they change the most.",
    "Moved: a bfloat16 model; publish_s is from parameters in memory to a version that can be read, coding included; "
    "pull_s from there to the reader's own parameters; digests are off, which cost the same in all of them.",
)
