"""`bench trl`: seconds a step of TRL's GRPOTrainer beside ours, on the same model, prompts and batch.

TRL runs in an environment of its own, by scripts/bench_trl.py, which also says how it is tuned. Both sides train on
every sample, also of groups with equal rewards, which TRL cannot leave out, and with a learning rate of 0, so that the
model answers alike from step to step. The cases run in turn, round after round.

Each side is given every core in two ways: as threads of one process, and as processes with a thread each.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from forge_async.apps.bench.figures import DROPPED_STEPS, cpu_figures, steady_rows, step_s_of
from forge_async.apps.bench.output import Report, num_cores
from forge_async.apps.bench.overlap import SAME_WORK
from forge_async.apps.bench.plan import Plan, in_another_process
from forge_async.apps.bench.runs import FinishedRun, run_grpo, run_process
from forge_async.apps.bench.trl_environment import ROOT, trl_python
from forge_async.config import Config
from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.records import PromptId

SCRIPT = ROOT / "scripts" / "bench_trl.py"
BOUNDS = (0, 2)
"""S of our cases."""
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlCase:
    """How TRL is given the machine's cores."""

    threads: int = 1
    """Of each process."""
    processes: int = 1
    """Among which a step's batch is shared."""

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return _with_more("trl", threads=self.threads, processes=self.processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class OurCase:
    """One of our runs."""

    bound: int
    """S."""
    threads: int = 1
    """Of each learner rank and engine."""
    processes: int = 1
    """Learner ranks, and engines."""

    @property
    def name(self) -> str:
        """As it stands in the table."""
        return _with_more(f"ours/S={self.bound}", threads=self.threads, processes=self.processes)

    def words(self) -> tuple[str, ...]:
        """Its dials."""
        return (
            "async.buffer=bounded",
            f"async.max_staleness={self.bound}",
            f"learner.threads={self.threads}",
            f"policy.threads={self.threads}",
            f"learner.ranks={self.processes}",
            f"policy.replicas={self.processes}",
        )


def measure(plan: Plan) -> Report:
    """Run the cases, interleaved."""
    python = trl_python(plan.folder / "install.log")
    model = plan.model_folder()
    spec = specification(plan.config, model, plan.steps)
    threads, groups = plan.threads or (1, num_cores()), plan.config.root.groups_per_step
    theirs: dict[TrlCase, list[dict[str, Any]]] = {case: [] for case in trl_cases(threads, groups)}
    ours: dict[OurCase, list[FinishedRun]] = {case: [] for case in our_cases(threads, groups)}
    for number in range(plan.rounds):
        for trl, results in theirs.items():
            print(f"round {number + 1}/{plan.rounds}: {trl.name}", flush=True)
            results.append(run_trl(python, spec, trl, plan.folder / f"{trl.name.replace('/', '-')}-{number}"))
        for case, runs in ours.items():
            print(f"round {number + 1}/{plan.rounds}: {case.name}", flush=True)
            words = (*plan.words, f"model.path={model}", *SAME_WORK, *case.words(), f"steps={plan.steps}")
            runs.append(run_grpo(words, plan.folder / f"{case.name.replace('/', '-')}-{number}"))
    return report(theirs, ours)


def trl_cases(threads: Sequence[int], groups_per_step: int) -> list[TrlCase]:
    """TRL with so many threads, and with as many processes instead."""
    return [
        *(TrlCase(threads=each) for each in threads),
        *(TrlCase(processes=each) for each in _processes(threads, groups_per_step)),
    ]


def our_cases(threads: Sequence[int], groups_per_step: int) -> list[OurCase]:
    """Our runs beside TRL's with `threads`.

    At S = 0 learner and engine take turns, so that each may have all the cores that TRL is given: as threads of one
    process, or as processes with a thread each, as many as can share a step's groups equally. Above it they compute at
    the same time, with one thread each.
    """
    return [
        *(OurCase(bound=0, threads=each) for each in threads),
        *(OurCase(bound=0, processes=each) for each in _processes(threads, groups_per_step)),
        *(OurCase(bound=bound) for bound in BOUNDS if bound),
    ]


def _processes(threads: Sequence[int], groups_per_step: int) -> list[int]:
    """Numbers of processes in place of threads, more than one, that share a step's groups equally."""
    return sorted({max(n for n in range(1, each + 1) if groups_per_step % n == 0) for each in threads} - {1})


def specification(config: Config, model: Path, steps: int) -> dict[str, Any]:
    """What scripts/bench_trl.py needs to do the same work as a run with `config`."""
    groups, group_size = config.root.groups_per_step, config.root.group_size
    return {
        "model": str(model),
        **in_another_process(prompts_of, config, model, groups * steps),
        "seed": config.root.seed,
        "steps": steps,
        "groups_per_step": groups,
        "group_size": group_size,
        "micro_batch_samples": groups * group_size,
        "max_new_tokens": config.sampling.max_new_tokens,
        "temperature": config.sampling.temperature,
        "clip_low": config.objective.clip_low,
        "clip_high": config.objective.clip_high,
        **dataclasses.asdict(config.optimizer),
        "lr": 0.0,
    }


def prompts_of(config: Config, model: Path, num_prompts: int) -> dict[str, list[Any]]:
    """The first prompts of a run, as text and tokens, and their answers. Raises ConfigError where they have none."""
    from forge_async.backends.tasks import open_task

    root = config.root
    source = open_task(str(model), config.task, prompts=root.prompts, reward=root.reward, seed=root.seed).source
    numbers = (divmod(position, len(source)) for position in range(num_prompts))
    prompts = [source.prompt(PromptId(source=source.name, epoch=epoch, index=index)) for epoch, index in numbers]
    if any("answer" not in prompt.data for prompt in prompts):
        raise ConfigError("bench trl rewards exact answers: every prompt needs a field `answer`.")
    return {
        "prompts": [prompt.text for prompt in prompts],
        "token_ids": [prompt.token_ids.tolist() for prompt in prompts],
        "answers": [str(prompt.data["answer"]) for prompt in prompts],
    }


def run_trl(python: Path, spec: Mapping[str, Any], case: TrlCase, stem: Path) -> dict[str, Any]:
    """Run the script once; returns what it wrote."""
    path, output = (stem.with_name(f"{stem.name}.{what}.json") for what in ("spec", "result"))
    path.write_text(json.dumps({**spec, "threads": case.threads, "output": str(output), "scratch": str(stem)}))
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": str(case.threads)}
    run_process(
        [str(python), *_launcher(case), str(SCRIPT), str(path)], stem.with_name(f"{stem.name}.log"), environment
    )
    result = json.loads(output.read_text())
    if len(result["step_s"]) <= DROPPED_STEPS:
        raise ForgeError(f"{len(result['step_s'])} steps are too few: {DROPPED_STEPS} are left out; raise --steps.")
    return result


def _launcher(case: TrlCase) -> list[str]:
    """Python's arguments that come before the script."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.processes}"]
    return launch if case.processes > 1 else []


def report(
    theirs: Mapping[TrlCase, Sequence[Mapping[str, Any]]], ours: Mapping[OurCase, Sequence[FinishedRun]]
) -> Report:
    """Figures of TRL's results and of our runs, by case."""
    rows: list[dict[str, Any]] = []
    for trl, results in theirs.items():
        rows.append({"case": trl.name, **trl_figures(results)})
    fastest_s = min(row["step_s"] for row in rows)
    for case, runs in ours.items():
        step_s = step_s_of([row for run in runs for row in steady_rows(run)])
        startup_s = median(run.head_s + float(run.summary["startup_s"]) for run in runs)
        cpu_s = cpu_figures(runs, num_cores())["cpu_s"]
        rows.append({"case": case.name, "step_s": step_s, "startup_s": startup_s, "cpu_s": cpu_s})
    for row in rows:
        row["ratio"] = fastest_s / row["step_s"]
    versions = next(result["versions"] for results in theirs.values() for result in results)
    notes = [
        "ratio: step time of the fastest TRL case over the case's own; more than 1 is faster than TRL.",
        "TRL: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
    ]
    return Report(bench="trl", rows=rows, notes=notes)


def _with_more(case: str, **counts: int) -> str:
    return "/".join([case, *(f"{name}={count}" for name, count in counts.items() if count > 1)])


def trl_figures(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Median step of the results, their first steps left out; CPU seconds as a mean, like ours."""
    return {
        "step_s": median(step_s for result in results for step_s in result["step_s"][DROPPED_STEPS:]),
        "startup_s": median(result["startup_s"] for result in results),
        "cpu_s": mean(cpu_s for result in results for cpu_s in result["cpu_s"][DROPPED_STEPS:]),
    }
