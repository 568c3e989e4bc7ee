"""Settings of the run: its directory, deadlines, evaluation and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Keys under `run`."""

    dir: str = setting("", "run directory; empty: runs/grpo-<time>")
    resume: bool = setting(False, "continue the run in run.dir")
    overwrite: bool = setting(False, "delete run.dir first when it exists")
    rollouts_per_step: int = setting(4, "rollouts written to rollouts.jsonl.zst each step", low=0)
    progress: str = setting(
        "auto", "progress display; auto: live on a terminal, lines elsewhere", choices=("auto", "live", "lines", "off")
    )
    start_timeout_s: float = setting(600.0, "longest time all processes may take to get ready", unit="s", low=1)
    step_timeout_s: float = setting(600.0, "longest wait for a batch, a step, a publication or a pull", unit="s", low=1)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    """Keys under `checkpoint`."""

    every_steps: int = setting(
        0, "write a Hugging Face folder each time this many steps are done; 0: only at the end", unit="steps", low=0
    )
    keep: int = setting(3, "newest checkpoints to keep", low=1)
