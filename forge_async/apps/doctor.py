"""Is all well? `python -m forge_async.apps.doctor parity [--config FILE] [key=value ...]`.

`parity`: do policy, learner and transformers give the same log-probabilities for the same weights and tokens?
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_async.apps.arguments import Parser
from forge_async.apps.exit import DONE, FAILED, guarded_main
from forge_async.apps.one_process import ENGINE, LEARNER, say_one_process
from forge_async.backends.sampled_parity import Difference, ParityPlan, compare
from forge_async.backends.tasks import check_prompts_fit, open_task
from forge_async.config.checks import check
from forge_async.config.loading import compose
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.pipeline.parity_alarm import ROUNDED_NATS
from forge_async.runtime.model_folder import resolve_model
from forge_async.runtime.model_shape import read_shape
from forge_async.runtime.preflight import check_before_start

NUM_PROMPTS = 8
MAX_NEW_TOKENS = 16
"""Longest completion that is compared; a difference shows in the first tokens as well as later."""
TINY_PARAMETERS = 10_000_000
TINY_NATS, FLOAT32_NATS = 1e-5, 1e-4
"""Tolerances in float32, of models below and above that size: differences grow with layers and logits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 all agree, 1 they do not, 2 bad usage, 130 interrupted."""
    return guarded_main(lambda: _main(parse(sys.argv[1:] if argv is None else argv)))


def _main(options: argparse.Namespace) -> int:
    config = compose(options.config, options.words)
    # A run's own config.yaml may be given, whose directory exists and does not matter here.
    config = config.replace({"run.dir": "", "run.resume": False, "run.overwrite": False})
    check(config)
    folder = resolve_model(config)
    check_before_start(config, folder)
    say_one_process(config, ENGINE, LEARNER)
    if config.policy.quantize != "none":
        print(
            f"policy.quantize={config.policy.quantize} is left out here, since it changes what the engine computes; "
            "`bench quantize` and the metric weights/probe_gap say by how much.",
            file=sys.stderr,
        )
    tolerance = options.tolerance or default_tolerance(config, read_shape(folder).num_parameters)
    print(f"comparing policy, learner and transformers on {folder} ...", flush=True)
    found, num_tokens = compare(plan_of(config, folder))
    return report(found, num_tokens, tolerance)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = Parser(prog="python -m forge_async.apps.doctor", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True, metavar="parity")
    parity = commands.add_parser("parity", help="compare policy, learner and transformers")
    parity.add_argument("words", nargs="*", metavar="key=value", help="such as model.path=FOLDER")
    parity.add_argument("--config", action="append", default=[], help="a YAML file or a shipped configuration")
    parity.add_argument("--tolerance", type=float, help="largest difference that passes, in nats")
    options = parser.parse_args(argv)
    if options.tolerance is not None and not options.tolerance > 0:
        raise ConfigError(f"--tolerance={options.tolerance:g} must be more than 0.")
    return options


def default_tolerance(config: Config, num_parameters: int) -> float:
    """What passes without `--tolerance`, in nats."""
    if {config.policy.dtype, config.learner.dtype} != {"float32"}:
        return ROUNDED_NATS
    return TINY_NATS if num_parameters < TINY_PARAMETERS else FLOAT32_NATS


def plan_of(config: Config, folder: Path) -> ParityPlan:
    """What is compared: completions of the first held-out prompts of the task, drawn from the whole vocabulary."""
    task = open_task(
        str(folder), config.task, prompts=config.root.prompts, reward=config.root.reward, seed=config.root.seed
    )
    check_prompts_fit(task, config.sampling.max_new_tokens, config.policy.max_model_tokens)
    prompts = task.source.held_out(NUM_PROMPTS)
    if not prompts:
        raise ConfigError(f"{task.source.name} has no held-out prompts to compare on; raise task.held_out_fraction.")
    # Over the whole vocabulary: models are compared, and what is left out by one but not the other would hide it.
    whole = dataclasses.replace(config.sampling, top_p=1.0, top_k=0)
    sampling = whole.until(task.renderer.stop_token_ids)
    return ParityPlan(
        folder=folder,
        prompts=[prompt.token_ids for prompt in prompts],
        sampling=dataclasses.replace(sampling, max_new_tokens=min(MAX_NEW_TOKENS, sampling.max_new_tokens)),
        policy=dataclasses.replace(config.policy, tensor_parallel=1, quantize="none"),
        learner=dataclasses.replace(config.learner, ranks=1, tensor_parallel=1, expert_parallel=1),
        seed=config.root.seed,
        timeout_s=config.run.start_timeout_s,
    )


def report(found: Sequence[Difference], num_tokens: int, tolerance: float) -> int:
    """Print the table and the verdict; returns the exit code."""
    print(f"log-probabilities of {num_tokens} sampled tokens, differences in nats:")
    print(f"  {'':<24}{'largest':>10}{'mean':>10}")
    for each in found:
        print(f"  {f'{each.first} - {each.second}':<24}{each.largest:>10.2g}{each.mean:>10.2g}")
    beyond = [f"{each.first} - {each.second}" for each in found if not each.largest <= tolerance]
    if beyond:
        print(f"NOT OK: {', '.join(beyond)} beyond {tolerance:g}")
        return FAILED
    print(f"ok: all within {tolerance:g}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
