"""Settings of the run: its directory, deadlines, evaluation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Keys under `run`."""

    dir: str = setting("", "run directory; empty: runs/grpo-<time>")
    resume: bool = setting(False, "continue the run in run.dir from its newest checkpoint")
    overwrite: bool = setting(False, "delete run.dir first when it exists")
    rollouts_per_step: int = setting(4, "rollouts written to rollouts.jsonl.zst each step", low=0)
    progress: str = setting(
        "auto", "progress display; auto: live on a terminal, lines elsewhere", choices=("auto", "live", "lines", "off")
    )
    start_timeout_s: float = setting(600.0, "longest time all processes may take to get ready", unit="s", low=1)
    step_timeout_s: float = setting(600.0, "longest wait for a batch, a step, a publication or a pull", unit="s", low=1)
    warn_after_s: float = setting(60.0, "a wait that lasts this long is told, with its cause", unit="s", low=0.1)
    parity_alarm: float | str = setting(
        "auto",
        "warn when engine and learner differ by more in a token's log-probability, both at the same version; "
        "auto: 1e-3 where both compute in float32, else 0.2, and never with policy.quantize, where weights.probe_limit "
        "is the limit",
        unit="nats",
        low=0,
        words=("auto",),
    )
    stop_timeout_s: float = setting(
        12.0, "longest time the processes may take to end before they are killed", unit="s", low=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Keys under `eval`."""

    every_steps: int = setting(
        0, "evaluate each time this many steps are done; 0: only before and after", unit="steps", low=0
    )
    num_prompts: int = setting(200, "held-out prompts of an evaluation; 0: no evaluation at all", low=0)
    samples: int = setting(
        1, "completions drawn of each prompt for pass@k, as in training, beside the greedy one; 1: greedy only", low=1
    )
    k: list[int] = setting([], "the k of pass@k, none above eval.samples; empty: 1 and eval.samples")

    @property
    def ks(self) -> tuple[int, ...]:
        """Which pass@k are told, ascending; none without samples."""
        return tuple(sorted(set(self.k or (1, self.samples)))) if self.samples > 1 else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Keys under `checkpoint`."""

    every_steps: int = setting(
        50,
        "write a checkpoint each time this many steps are done: a Hugging Face folder that the run can go on from; "
        "0: only at the end",
        unit="steps",
        low=0,
    )
    keep: int = setting(3, "newest checkpoints to keep", low=1)
    keep_best: bool = setting(
        True,
        "write one where an evaluation on the way begins, and keep that of the best greedy score beside the newest",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """Keys under `sft`: supervised fine-tuning on demonstrations."""

    data: str = setting("", "a .jsonl file of prompt and completion; empty: the task's own prompts and answers")
    num_prompts: int = setting(0, "distinct demonstrations, used again and again; 0: as many as there are", low=0)
    steps: int = setting(300, "optimiser steps", unit="steps", low=1)
    batch_samples: int = setting(64, "demonstrations of one step", low=1)
    lr: float = setting(1e-3, "learning rate after warm-up", low=0.0)
    warmup_steps: int = setting(20, "steps of linear warm-up", unit="steps", low=0)
    min_lr_factor: float = setting(0.2, "share of lr that the linear decay ends at", low=0.0, high=1.0)
    output: str = setting("", "folder to write the model to; empty: runs/sft-<time>/model")
