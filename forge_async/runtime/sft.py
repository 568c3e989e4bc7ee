"""Supervised fine-tuning: demonstrations to the learner's ranks, step after step, then a Hugging Face folder."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from forge_async.actors.learner_actor import LearnerActor, LearnerPlan
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.core.records import PromptId, Samples
from forge_async.observe.run_directory import default_path
from forge_async.prompt.ports import PromptSource, Renderer
from forge_async.rollout.demonstrations import demonstration_samples
from forge_async.runtime.meshes import Placement, close_monarch

REPORT_EVERY_S = 5.0


async def run_sft(config: Config, model_folder: Path, say: Callable[[str], None]) -> Path:
    """Train on demonstrations and return the folder that was written. `say` is given lines for people."""
    from forge_async.backends.tasks import open_task

    output = Path(config.sft.output or default_path("sft") / "model").expanduser().resolve()
    if output.exists():
        raise ConfigError(f"sft.output={output} exists; give another folder, or delete it first.")
    task = open_task(
        str(model_folder), config.task, prompts=config.sft.data, reward="-", seed=config.root.seed, demonstrations=True
    )
    batches = _batches(config, task.source, task.renderer)
    scratch = Path(tempfile.mkdtemp(prefix="forge-sft-"))
    placement = await Placement.start(config.job, scratch)
    try:
        learner = await LearnerActor.options(
            mesh_name="learner",
            hosts=placement.learner,
            procs=config.learner.ranks,
            spmd=True,
            with_gpus=config.job.gpus_per_host > 0,
            start_timeout_s=config.run.start_timeout_s,
        ).as_actor(_plan(config, model_folder))
        shown_s = begun_s = time.monotonic()
        for step, samples in zip(range(config.sft.steps), batches, strict=False):
            result = (await learner.train.call_ranks(samples, timeout_s=config.run.step_timeout_s))[0]
            if time.monotonic() - shown_s >= REPORT_EVERY_S or step + 1 == config.sft.steps:
                shown_s = time.monotonic()
                say(f"step {step + 1}/{config.sft.steps}  loss {result.loss:.3f}  {shown_s - begun_s:.0f} s")
        output.parent.mkdir(parents=True, exist_ok=True)
        await learner.save.call_ranks(str(output), timeout_s=config.run.step_timeout_s)
    finally:
        await asyncio.shield(placement.stop(config.run.stop_timeout_s))
        shutil.rmtree(scratch, ignore_errors=True)
        await close_monarch()
    return output


def _plan(config: Config, model_folder: Path) -> LearnerPlan:
    optimizer = dataclasses.replace(
        config.optimizer,
        lr=config.sft.lr,
        warmup_steps=config.sft.warmup_steps,
        decay="linear",
        min_lr_factor=config.sft.min_lr_factor,
    )
    return LearnerPlan(
        model_folder=str(model_folder),
        learner=config.learner,
        optimizer=optimizer,
        objective=None,
        correction="none",
        total_steps=config.sft.steps,
        seed=config.root.seed,
        temperature=1.0,
        publish_dtype="float32",
        lora=config.lora,
        merge_adapters=config.weights.merge_adapters,
    )


def _batches(config: Config, source: PromptSource, renderer: Renderer) -> Iterator[Samples]:
    """Endless batches of demonstrations: prompts in the order of the source, epoch after epoch."""
    stop = np.array(renderer.stop_token_ids[:1], dtype=np.int32)
    position, limit = 0, config.sft.num_prompts
    while True:
        prompts, completions = [], []
        for _ in range(config.sft.batch_samples):
            epoch, index = divmod(position % limit if limit else position, len(source))
            position += 1
            prompt = source.prompt(PromptId(source=source.name, epoch=epoch, index=index))
            answer = prompt.data.get("completion", prompt.data.get("answer"))
            if answer is None:
                raise ConfigError(
                    f"prompt {prompt.id} has neither a completion nor an answer to learn from; add one to sft.data."
                )
            prompts.append(prompt.token_ids)
            completions.append(np.concatenate([renderer.encode(str(answer)), stop]))
        yield demonstration_samples(prompts, completions)
