"""What `--dry-run` prints: everything that can be checked and told of a run without starting it.

Nothing is written, made or fetched: not the run directory, not the warm start, not a model of the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_async.config.schema import Config
from forge_async.learner.frozen import frozen_folders
from forge_async.replay.lanes import Lanes
from forge_async.replay.settings import AUTO
from forge_async.runtime import jobs, preflight
from forge_async.runtime.model_folder import find_model
from forge_async.runtime.model_shape import DTYPE_BYTES, ModelShape, read_shape

BASE_BYTES = {
    "controller": 120e6,
    "learner": 700e6,
    "reference": 700e6,
    "policy": 800e6,
    "rollout": 200e6,
    "store": 360e6,
    "replay": 120e6,
}
"""What a process of each kind takes for its libraries, measured with the tiny model on CPU (STACK, part 3)."""
TRAINING_BYTES = 16
"""Of a parameter in the learner: float32 weights, gradients and AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Processes of one kind."""

    kind: str
    number: int
    where: str
    what: str
    num_bytes: float
    """Estimated memory of one of them."""


def describe(config: Config) -> str:
    """Check `config` as far as that goes without starting, and describe the run that it would be.

    Raises ConfigError for whatever the checks find.
    """
    preflight.check_machine(config)
    folder = find_model(config)
    shape = longest = None
    if folder is None:
        preflight.check_task(config)
    else:
        shape = read_shape(folder, config.model.path)
        preflight.check_shape(config, shape)
        longest = preflight.check_prompts(config, folder)
    sections = [
        ("run", _run_lines(config, folder, shape, longest)),
        ("asynchrony", _asynchrony_lines(config)),
        ("placement", _placement_lines(config, shape)),
    ]
    if shape is not None:
        sections.append(("engine", _engine_lines(config, shape)))
    text = "\n\n".join("\n".join((title, *(f"  {line}" for line in lines))) for title, lines in sections)
    if config.job.kind in ("slurm", "kubernetes"):
        text += f"\n\nspecification of the job\n{_specification(config)}"
    missing = "" if shape is not None else "; the model is not at hand, so it was not looked at"
    return f"{text.rstrip()}\n\nEverything that can be checked without starting is in order{missing}."


def _specification(config: Config) -> str:
    engines = config.policy.replicas * config.policy.tensor_parallel
    references = config.reference.ranks if config.reference.is_service else 0
    return jobs.describe(
        config.job, learner_procs=config.learner.ranks, policy_procs=engines, reference_procs=references
    )


def _run_lines(config: Config, folder: Path | None, shape: ModelShape | None, longest: int | None) -> list[str]:
    root = config.root
    task = f"the prompts of {root.prompts}" if root.prompts else f"task {config.task.name}"
    prompts = "" if longest is None else f", prompts of up to {longest} tokens"
    rollouts = root.group_size * root.groups_per_step
    return _aligned(
        [
            ("directory", config.run.dir or "runs/grpo-<time>"),
            ("model", _model_text(config, folder)),
            ("", "" if shape is None else _shape_text(shape)),
            ("prompts", f"{task}{prompts}; at most {config.sampling.max_new_tokens} new tokens"),
            ("reward", root.reward or "the task's own"),
            ("steps", f"{root.steps} of {root.groups_per_step} groups of {root.group_size}: {rollouts} rollouts each"),
        ]
    )


def _model_text(config: Config, folder: Path | None) -> str:
    path = config.model.path
    if folder is not None:
        return str(folder) if str(folder) == path else f"{path}, at {folder}"
    if not path:
        return "the tiny warm start of the task; the first run makes it and keeps it in the cache"
    return f"{path}, which the first run fetches or converts"


def _shape_text(shape: ModelShape) -> str:
    return (
        f"{shape.kind}, {_count(shape.num_parameters)} parameters: {shape.num_layers} layers of {shape.hidden_size}, "
        f"{shape.num_heads} heads of {shape.head_dim} ({shape.num_kv_heads} for keys and values), "
        f"vocabulary {shape.vocab_size:,}"
    )


def _asynchrony_lines(config: Config) -> list[str]:
    dials, groups = config.asynchrony, config.root.groups_per_step
    lanes = Lanes.of(dials, groups)
    bound = lanes.normal.bound
    if not bound.bounded:
        return [
            f"no bound on age (async.buffer={dials.buffer}); at most {dials.max_queue_tokens:,} tokens in the queue"
        ]
    if bound.synchronous:
        first = f"synchronous: {bound.depth} groups are made, then trained on, in turn"
    else:
        first = (
            f"a token is at most {_times(dials.highest_staleness or 0, 'step')} old when it is trained on"
            + (f", {_times(bound.max_staleness, 'step')} to begin with" if dials.max_staleness == AUTO else "")
            + f"; up to {lanes.depth} "
            f"groups are under way, {groups} a step"
        )
    if lanes.fresh is not None:
        first += f", {lanes.fresh.bound.groups_per_step} of them made wholly by the version that trains on them"
    every = "step" if dials.publish_every == 1 else f"{dials.publish_every} steps"
    order = f"order {dials.order}" + (f" within a window of {bound.window} groups" if bound.window > 1 else "")
    return [
        first,
        f"{order}; correction {dials.correction}; at most {dials.max_queue_tokens:,} tokens in the queue",
        f"weights are published every {every}; they arrive by swap {dials.swap}",
    ]


def _placement_lines(config: Config, shape: ModelShape | None) -> list[str]:
    rows = _rows(config, shape)
    cells = [("process", "number", "where", "what", "memory, about" if shape is not None else "")]
    for row in rows:
        each = " each" if row.number > 1 else ""
        cells.append((row.kind, str(row.number), row.where, row.what, f"{_size(row.num_bytes)}{each}" if shape else ""))
    lines = _aligned(cells)
    if shape is not None and config.job.gpus_per_host == 0 and config.job.kind in ("local", "process"):
        total, here = sum(row.number * row.num_bytes for row in rows), _memory_here()
        warning = "; THIS MAY NOT FIT" if total > here else ""
        lines.append(f"together about {_size(total)} of this machine's {_size(here)}{warning}")
    return lines


def _rows(config: Config, shape: ModelShape | None) -> list[Row]:
    learner, policy, rollout = config.learner, config.policy, config.rollout
    sizes = _sizes(config, shape)
    gpu = config.job.gpus_per_host > 0
    copies, tensor = learner.ranks // learner.tensor_parallel, learner.tensor_parallel
    meshes = (("FSDP2", copies), ("tensor parallelism", tensor))
    mesh = "".join(f"{kind} over {_times(ranks, 'rank')}, " for kind, ranks in meshes if ranks > 1)
    layers = "" if policy.quantize == "none" else f", linear layers in {policy.quantize}"
    ranks = f"{policy.tensor_parallel} ranks to an engine, " if policy.tensor_parallel > 1 else ""
    return [
        Row(kind="controller", number=1, where="here", what="the loops", num_bytes=sizes["controller"]),
        Row(
            kind="learner",
            number=learner.ranks,
            where=_place(config, "learner"),
            what=f"torchtitan, {mesh}{learner.dtype}{', a GPU each' if gpu else ''}",
            num_bytes=sizes["learner"],
        ),
        *_reference_rows(config, sizes),
        Row(
            kind="policy",
            number=policy.replicas * policy.tensor_parallel,
            where=_place(config, "policy"),
            what=f"vLLM, {ranks}{policy.dtype}{layers}{', a GPU each' if gpu else ''}",
            num_bytes=sizes["policy"],
        ),
        Row(
            kind="rollout",
            number=rollout.workers,
            where="here",
            what=f"turns; {_times(rollout.reward_workers, 'reward process', 'reward processes')} each",
            num_bytes=sizes["rollout"],
        ),
        Row(kind="store", number=1, where="here", what="torchstore, weights by version", num_bytes=sizes["store"]),
        Row(kind="replay", number=1, where="here", what="ledger, buffer, journal", num_bytes=sizes["replay"]),
    ]


def _reference_rows(config: Config, sizes: dict[str, float]) -> list[Row]:
    if not config.reference.is_service:
        return []
    gpu = ", a GPU each" if config.job.gpus_per_host else ""
    names = " and ".join(name.removesuffix("_logprobs") for name in frozen_folders(config.objective, Path()))
    return [
        Row(
            kind="reference",
            number=config.reference.ranks,
            where=_place(config, jobs.REFERENCE),
            what=f"torchtitan, {names}, read only{gpu}",
            num_bytes=sizes["reference"],
        )
    ]


def _place(config: Config, role: str) -> str:
    job, count = config.job, jobs.num_hosts(config.job, role)
    if job.kind == "local":
        return "here"
    if role == jobs.REFERENCE and not count:
        return f"the first of {_place(config, 'learner')}" if job.learner_hosts > 1 else _place(config, "learner")
    if job.kind == "process":
        return f"a Monarch host of its own here ({role})"
    return f"{_times(count, f'{job.kind} host')} ({jobs.mesh_name(job, role)})"


def _sizes(config: Config, shape: ModelShape | None) -> dict[str, float]:
    """Estimated bytes of one process of each kind; libraries only where the model is not known."""
    sizes = dict(BASE_BYTES)
    if shape is None:
        return sizes
    policy, learner = config.policy, config.learner
    published = shape.num_parameters * DTYPE_BYTES[policy.dtype]
    # A snapshot; with deltas beside it what was published last, and the one before.
    copies = 3 if config.weights.makes_deltas(is_shared=config.weights.transport in ("auto", "shm", "ipc")) else 1
    sizes["learner"] += (shape.num_parameters * TRAINING_BYTES + copies * published) / learner.ranks
    sizes["learner"] += _forward_bytes(config, shape)
    where, ranks = ("reference", config.reference.ranks) if config.reference.is_service else ("learner", learner.ranks)
    sizes[where] += _frozen_bytes(config, shape) / ranks
    # What it serves, and the version that is arriving.
    sizes["policy"] += 2 * published / policy.tensor_parallel + policy.kv_cache_bytes
    sizes["store"] += (config.weights.keep_versions + 1) * published
    return sizes


def _frozen_bytes(config: Config, shape: ModelShape) -> float:
    """Of the models that are only read, in float32; with adapters the learner has the reference below them."""
    folders = frozen_folders(config.objective, Path())
    if config.lora.rank and not config.reference.is_service:
        folders.pop("reference_logprobs", None)
    shapes = [
        read_shape(folder, str(folder)) if name == "teacher_logprobs" else shape for name, folder in folders.items()
    ]
    return 4.0 * sum(each.num_parameters for each in shapes)


def _forward_bytes(config: Config, shape: ModelShape) -> float:
    """Of one micro-batch: what the backward pass needs of every layer, and logits, their softmax and its gradient."""
    tokens, width = config.learner.micro_batch_tokens, DTYPE_BYTES[config.learner.dtype]
    layers = shape.num_layers if config.learner.activation_checkpointing == "none" else 2
    activations = tokens * layers * (10 * shape.hidden_size + 4 * shape.intermediate_size) * width
    return activations + 3 * tokens * shape.vocab_size * 4


def _engine_lines(config: Config, shape: ModelShape) -> list[str]:
    policy = config.policy
    per_token = shape.kv_bytes_per_token(policy.dtype)
    at_once = preflight.full_length_sequences(config, shape)
    return [
        f"KV cache {_size(policy.kv_cache_bytes)} at {_size(per_token)} a token: {_times(at_once, 'sequence')} of full "
        f"length ({policy.max_model_tokens} tokens) at a time, of at most {policy.max_sequences}",
    ]


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with straight columns; a row whose last cell is empty goes where all others are."""
    rows = [row for row in rows if any(row)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _times(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _count(number: int) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _size(num_bytes: float) -> str:
    for power, name in ((3, "GB"), (2, "MB"), (1, "kB")):
        if num_bytes >= 1000**power:
            return f"{num_bytes / 1000**power:.3g} {name}"
    return f"{num_bytes:.0f} bytes"


def _memory_here() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
