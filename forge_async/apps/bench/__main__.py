"""`python -m forge_async.apps.bench NAME [--json FILE] [key=value ...]`: measure, print a table, write a JSON file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from forge_async.apps.arguments import Parser, path
from forge_async.apps.bench import (
    adapters,
    compiling,
    deltas,
    objectives,
    overlap,
    packing,
    quantized,
    reshard,
    rules,
    start,
    swaps,
    trl,
    weights,
)
from forge_async.apps.bench.output import Report, print_table, write_json
from forge_async.apps.bench.plan import Plan
from forge_async.apps.exit import DONE, guarded_main
from forge_async.core.errors import ConfigError
from forge_async.observe.run_directory import default_path

BENCHES: dict[str, Callable[[Plan], Report]] = {
    "adapters": adapters.measure,
    "compile": compiling.measure,
    "start": start.measure,
    "deltas": deltas.measure,
    "objectives": objectives.measure,
    "overlap": overlap.measure,
    "packing": packing.measure,
    "quantize": quantized.measure,
    "reshard": reshard.measure,
    "rules": rules.measure,
    "swaps": swaps.measure,
    "trl": trl.measure,
    "weights": weights.measure,
}
"""Name -> what measures; each module begins with what it shows."""
ROUNDS_AND_STEPS = {
    "adapters": (8, 1),
    "compile": (9, 1),
    "start": (3, 1),
    "deltas": (5, 1),
    "objectives": (2, 100),
    "overlap": (2, 40),
    "packing": (5, 1),
    "quantize": (5, 1),
    "reshard": (9, 1),
    "rules": (1, 1),
    "swaps": (1, 60),
    "trl": (2, 30),
    "weights": (5, 1),
}
"""Runs of each case, and learner steps of a run, when the user says nothing."""
ONLY = {"overlap": overlap.PARTS, "objectives": objectives.PARTS, "compile": compiling.PARTS}
"""The parts that `--only` chooses from."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 done, 1 failed, 2 bad usage, 130 interrupted."""
    return guarded_main(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int:
    options = parse(argv)
    plan = plan_of(options)
    report = BENCHES[options.name](plan)
    target = options.json or plan.folder / "bench.json"
    write_json(report, target)
    print_table(report)
    print(f"\nwritten: {target}")
    return DONE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = Parser(prog="python -m forge_async.apps.bench", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHES), metavar="NAME", help=", ".join(sorted(BENCHES)))
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration of every run")
    parser.add_argument("--config", action="append", default=[], help="configuration file or name; repeatable")
    parser.add_argument("--json", type=path, help="file to write; without it bench.json in the folder of the runs")
    parser.add_argument("--folder", type=path, help="new folder for the runs; without it runs/bench-NAME-<time>")
    parser.add_argument("--rounds", type=int, default=0, help="runs of each case; medians are taken over them")
    parser.add_argument("--steps", type=int, default=0, help="learner steps of a run (objectives, overlap, swaps, trl)")
    parser.add_argument("--skip-cold", action="store_true", help="start: leave the cold start out")
    parser.add_argument("--threads", type=int, action="append", default=[], help="trl: threads of TRL; repeatable")
    parser.add_argument("--trace", type=path, help="rules: a run's events.jsonl to play instead of the seeded trace")
    parser.add_argument("--only", default="", help="compile, objectives, overlap: the one part to measure")
    parser.add_argument("--pairs", type=int, default=10, help="objectives: paired seeds of S=2 and S=8 against S=0")
    parser.add_argument("--out", type=path, help="objectives, overlap: file of finished runs, to go on with")
    parser.add_argument("--jobs", type=int, default=0, help="objectives: runs at the same time; one for each core")
    parser.add_argument("--bytes", type=float, default=0.0, help="weights, deltas: bytes of the model, such as 1e9")
    parser.add_argument(
        "--tensors", type=int, action="append", default=[], help="weights, reshard: tensors in it; repeatable"
    )
    options = parser.parse_intermixed_args(argv)
    known = ONLY.get(options.name, ())
    if options.only and options.only not in known:
        there = f"there are {', '.join(known)}" if known else f"{options.name} has no parts; leave it out"
        raise ConfigError(f"--only {options.only} is no part of {options.name}: {there}.")
    counts = (*options.threads, *options.tensors)
    if min(options.rounds, options.steps, options.bytes, options.pairs, options.jobs, *counts, 0) < 0 or 0 in counts:
        raise ConfigError("--rounds, --steps, --pairs, --jobs, --threads, --bytes and --tensors must be at least 1.")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """What to run: the options with their defaults filled in. Makes the folder of the runs."""
    rounds, steps = ROUNDS_AND_STEPS[options.name]
    folder = options.folder or default_path(f"bench-{options.name}").resolve()
    if folder.exists():
        raise ConfigError(f"--folder {folder} exists; give another one, or delete it first.")
    plan = Plan.of(
        options.config,
        options.overrides,
        folder=folder,
        rounds=options.rounds or rounds,
        steps=options.steps or steps,
        cold=not options.skip_cold,
        threads=options.threads,
        only=options.only,
        trace=options.trace,
        num_bytes=options.bytes,
        tensors=options.tensors,
        pairs=options.pairs,
        out=options.out,
        jobs=options.jobs,
    )
    folder.mkdir(parents=True)
    return plan


if __name__ == "__main__":
    sys.exit(main())
