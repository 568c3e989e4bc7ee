"""Evaluate on held-out prompts: `python -m forge_async.apps.eval RUN_OR_FOLDER [--config FILE] [key=value ...]`.

A run, or a checkpoint of one, is evaluated on the run's own task and settings; files and keys go over them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forge_async.apps.arguments import Parser, path
from forge_async.apps.exit import DONE, guarded_main
from forge_async.apps.generate import Model, find_model
from forge_async.apps.one_process import ENGINE, say_one_process
from forge_async.backends import folder_engine
from forge_async.backends.tasks import OpenTask, check_prompts_fit, open_task
from forge_async.config.checks import check
from forge_async.config.loading import compose
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.core.versions import PolicyVersion
from forge_async.observe.jsonl import plain
from forge_async.observe.run_directory import write_atomically
from forge_async.pipeline.estimates import Estimate
from forge_async.pipeline.evaluate import Evaluator
from forge_async.pipeline.ports import EvalScores
from forge_async.policy.local import LocalPolicy
from forge_async.policy.service import RequestService
from forge_async.policy.settings import PolicySettings
from forge_async.reward.pool import ProcessRewardPool
from forge_async.runtime.model_shape import read_shape


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 done, 1 failed, 2 bad usage or configuration, 130 interrupted."""
    return guarded_main(lambda: _main(parse(sys.argv[1:] if argv is None else argv)))


def _main(options: argparse.Namespace) -> int:
    model = find_model(options.model)
    config = configure(model, options.config, options.words)
    begun = time.monotonic()
    scores = asyncio.run(evaluate(model, config))
    for line in lines(scores, config):
        print(line)
    if options.json:
        write_atomically(options.json, json.dumps(plain(record(model, config, scores)), indent=2) + "\n")
    print(f"{model.folder}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return DONE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = Parser(prog="python -m forge_async.apps.eval", description=__doc__)
    parser.add_argument("model", metavar="RUN_OR_FOLDER", help="a run (its newest checkpoint) or a model folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="such as eval.samples=8 eval.k=[1,8]")
    parser.add_argument("--config", action="append", default=[], help="a YAML file or a shipped configuration")
    parser.add_argument("--json", type=path, metavar="FILE", help="write the figures there too")
    return parser.parse_intermixed_args(argv)


def configure(model: Model, configs: Sequence[str], words: Sequence[str]) -> Config:
    """The run's configuration, or the defaults, under the given files and keys. Raises ConfigError."""
    run = run_of(model.folder)
    config = compose([*([run / "config.yaml"] if run else []), *configs], words)
    if not config.eval.num_prompts:
        raise ConfigError("eval.num_prompts=0 leaves nothing to evaluate; give eval.num_prompts=200 or so.")
    # What the run's configuration says of its own directory and of the model that it began with is of no matter here.
    config = config.replace(
        {"run.dir": "", "run.resume": False, "run.overwrite": False, "model.path": str(model.folder)}
    )
    check(config)
    return config


def run_of(folder: Path) -> Path | None:
    """The directory of the run whose checkpoint `folder` is, or None."""
    run = folder.parent.parent
    return run if folder.parent.name == "checkpoints" and (run / "config.yaml").is_file() else None


async def evaluate(model: Model, config: Config) -> EvalScores:
    """Start the engine and the rewards, have the held-out prompts answered and scored, and end both."""
    longest = min(read_shape(model.folder).max_positions, config.policy.max_model_tokens)
    settings = dataclasses.replace(config.policy, max_model_tokens=longest, tensor_parallel=1)
    task = open_task(
        str(model.folder), config.task, prompts=config.root.prompts, reward=config.root.reward, seed=config.root.seed
    )
    check_prompts_fit(task, config.sampling.max_new_tokens, longest)
    prompts = task.source.held_out(config.eval.num_prompts)
    if not prompts:
        raise ConfigError(f"{task.source.name} has no held-out prompts; raise task.held_out_fraction.")
    say_one_process(config, ENGINE)
    print(f"loading {model.folder} ...", file=sys.stderr, flush=True)
    scorer = ProcessRewardPool(task.exact or task.reward, timeout_s=config.root.reward_timeout_s)
    service = RequestService(lambda: _build_engine(model, settings))
    try:
        await asyncio.gather(service.start(), scorer.start())
        return await _evaluator(config, task, scorer).evaluate(prompts, LocalPolicy(service), "eval")
    finally:
        await asyncio.gather(service.close(), scorer.close())


def _evaluator(config: Config, task: OpenTask, scorer: ProcessRewardPool) -> Evaluator:
    return Evaluator(
        renderer=task.renderer,
        scorer=scorer,
        sampling=config.sampling.until(task.renderer.stop_token_ids),
        settings=config.eval,
        seed=config.root.seed,
    )


def _build_engine(model: Model, settings: PolicySettings) -> Any:
    """The real engine with the folder's weights. Runs on the engine's own thread."""
    return folder_engine.build(model.folder, settings, PolicyVersion(step=model.step))


def lines(scores: EvalScores, config: Config) -> list[str]:
    """What is printed: one line a figure, each with its 95% interval."""
    scored = "the reward" if config.root.reward else "exact match"
    prompts = f"{scores.num_prompts} held-out prompts of {config.root.prompts or config.task.name}"
    drawn = f"{scores.num_samples} samples a prompt at temperature {config.sampling.temperature:g}"
    found = [_line("greedy", scores.greedy, f"{prompts}, {scored}")]
    if scores.sampled is not None:
        found.append(_line("sampled", scores.sampled, drawn))
    return found + [_line(f"pass@{each.k}", each.estimate, drawn) for each in scores.pass_at]


def _line(name: str, found: Estimate, text: str) -> str:
    return f"{name:<9}{found.mean:.3f}  [{found.low:.3f}, {found.high:.3f}]  {text}"


def record(model: Model, config: Config, scores: EvalScores) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "model": str(model.folder),
        "step": model.step,
        "task": config.root.prompts or config.task.name,
        "seed": config.root.seed,
        "temperature": config.sampling.temperature,
        "num_prompts": scores.num_prompts,
        "num_samples": scores.num_samples,
        "greedy": asdict(scores.greedy),
        "sampled": asdict(scores.sampled) if scores.sampled else None,
        **{f"pass_at_{each.k}": asdict(each.estimate) for each in scores.pass_at},
    }


if __name__ == "__main__":
    sys.exit(main())
