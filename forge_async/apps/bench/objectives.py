"""`bench objectives`: what objective, correction and staleness do to learning, on one tiny task.

From the default objective one factor is varied at a time: `objective.name`, `async.correction`, S. Beside the tables
stands the question whether asynchrony costs reward: S = 2, and S = 8, against S = 0, seed by seed. All runs are those
of `one_process.py`, one after the other on each engine, an engine for each core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from forge_async.apps.bench.objectives_picture import write_pictures
from forge_async.apps.bench.output import Report, machine, num_cores
from forge_async.apps.bench.paired import paired_difference
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.results_file import Record, ResultsFile, code_hash, model_hash, run_key
from forge_async.apps.bench.run_workers import RunWorker
from forge_async.config import load
from forge_async.learner.settings import OBJECTIVES
from forge_async.replay.settings import CORRECTIONS

TASK = (
    "task.options.min_word_len=3",
    "task.options.max_word_len=3",
    "sampling.max_new_tokens=5",
    "groups_per_step=32",
    "optimizer.lr=5e-4",
    "optimizer.warmup_steps=10",
    "eval.samples=8",
)
"""The default task with words of three letters, and half a batch: 100 steps take half a minute of one core."""
BOUNDS = (0, 1, 2, 4, 8)
PARTS = ("objectives", "corrections", "staleness", "pairs")
BASE, BASELINE, LARGE = 2, 0, 8
"""S of the tables; S that pairs are compared with; the large S that is compared too."""
LAST_STEPS, FIRST_STEPS = 10, 5
"""Steps that `reward_last` and `reward_first` are means of."""
FINAL_STEPS, FINAL_SHARE = 40, 5
"""Pairs compare means over more steps, since a policy's reward swings by a point or two within ten of them: the last
40, or the last fifth of a run that is shorter than five times that."""
TARGET, TARGET_STEPS = 0.85, 5
"""`steps_to_target`: until the mean of the last five steps' rewards is that high."""
AIM_POINTS = 2.0
"""Within how many points of reward asynchrony is to be of synchrony."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A factor at one of its values; several cases may be one run."""

    name: str
    """`objective/gspo`, `correction/icepop`, `S=4`."""
    words: tuple[str, ...]
    """What it sets."""


def cases(part: str) -> Sequence[Case]:
    """The cases of a part, the default objective at S = 2 among them."""
    if part == "objectives":
        return [_case(f"objective/{name}", BASE, f"objective.name={name}") for name in OBJECTIVES]
    if part == "corrections":
        return [_case(f"correction/{name}", BASE, *_corrected_by(name)) for name in CORRECTIONS]
    return [_case(f"S={bound}", bound) for bound in (BOUNDS if part == "staleness" else (BASELINE, BASE, LARGE))]


def _case(name: str, bound: int, *words: str) -> Case:
    return Case(name=name, words=(f"async.max_staleness={bound}", *words))


def _corrected_by(name: str) -> tuple[str, ...]:
    return (f"async.correction={name}", *(("async.force_uncorrected=true",) if name == "none" else ()))


def measure(plan: Plan) -> Report:
    """Run what is not in the results file yet, then tell of all that is asked for."""
    parts = [part for part in PARTS if plan.only in ("", part) and (part != "pairs" or plan.pairs)]
    wanted = list(_wanted(plan, parts))
    runs = _Runs(plan, plan.model_folder(load(_words(plan, (), 0))[0]))
    runs.do(wanted)
    tables = [part for part in parts if part != "pairs"]
    rows = [row for part in tables for row in runs.rows(part)]
    pairs = runs.pairs() if "pairs" in parts else []
    ends = {case.name: runs.ends(case) for part in tables for case in cases(part)}
    pictures = write_pictures(runs.courses(), ends, plan.folder)
    notes = [*_notes(pairs), *(f"picture: {path}" for path in pictures)]
    return Report(bench="objectives", rows=[*rows, *pairs], notes=notes)


def _wanted(plan: Plan, parts: Sequence[str]) -> Iterator[tuple[Case, int]]:
    """Every case and seed, seed after seed, so that what was stopped has as many seeds of each."""
    for seed in range(max(plan.rounds, plan.pairs)):
        for part in parts:
            if seed < (plan.pairs if part == "pairs" else plan.rounds):
                yield from ((case, seed) for case in cases(part))


def _words(plan: Plan, words: Sequence[str], seed: int) -> tuple[str, ...]:
    """The command line of a run; what the user says goes over the task's own."""
    return (*TASK, f"steps={plan.steps}", *plan.own_words, *words, f"seed={plan.config.root.seed + seed}")


class _Runs:
    """The runs of one call, old and new."""

    def __init__(self, plan: Plan, model: Path) -> None:
        self._plan, self._model = plan, model
        self._file = ResultsFile(plan.out or plan.folder / "runs.json")
        self._model_hash, self._code = model_hash(model), code_hash()
        self._commit = machine()["commit"]
        self._keys: dict[tuple[Case, int], str] = {}
        self._lock = threading.Lock()
        self._counts = [0, 0]

    def do(self, wanted: Sequence[tuple[Case, int]]) -> None:
        """Run what the file lacks, on as many engines as there are jobs."""
        missing: dict[str, tuple[Case, int]] = {}
        for case, seed in wanted:
            key = self._key(case, seed)
            if key not in self._file:
                missing.setdefault(key, (case, seed))
        self._counts = [0, len(missing)]
        num_at_hand = len({self._key(*each) for each in wanted}) - len(missing)
        print(f"{len(missing)} runs to do, {num_at_hand} at hand", flush=True)
        left, num_jobs = iter(missing.items()), min(self._plan.jobs or num_cores(), len(missing))
        if num_jobs:
            with ThreadPoolExecutor(num_jobs) as threads:
                # A generator is shared, so each job takes the next run under the lock.
                for done in [threads.submit(self._work, number, left) for number in range(num_jobs)]:
                    done.result()

    def rows(self, part: str) -> list[dict[str, Any]]:
        """A row for each case of a part: means over its seeds."""
        found = []
        for case in cases(part):
            records = [self._record(case, seed) for seed in range(self._plan.rounds)]
            found.append({"case": case.name, **case_figures(records)})
        return found

    def ends(self, case: Case) -> list[float]:
        """Final reward of a case with each seed."""
        return [reward_last(self._record(case, seed)) for seed in range(self._plan.rounds)]

    def pairs(self) -> list[dict[str, Any]]:
        """Differences of S = 2 and S = 8 from S = 0 over the paired seeds, in points of reward."""
        seeds, (baseline, *others) = range(self._plan.pairs), cases("pairs")
        found = []
        for case in others:
            pairs = [(self._record(case, seed), self._record(baseline, seed)) for seed in seeds]
            found.append({"case": f"pairs/{case.name}", **pair_figures(pairs)})
        return found

    def courses(self) -> dict[str, list[list[float]]]:
        """Rewards by step of each S, a list for each seed."""
        cases_of = {case.name: case for part in ("staleness", "pairs") for case in cases(part)}
        seeds = range(max(self._plan.rounds, self._plan.pairs))
        found = {
            name: [list(self._file[key]["rewards"]) for seed in seeds if (key := self._key(case, seed)) in self._file]
            for name, case in sorted(cases_of.items())
        }
        return {name: runs for name, runs in found.items() if runs}

    def _work(self, number: int, left: Iterator[tuple[str, tuple[Case, int]]]) -> None:
        with RunWorker(self._plan.folder / f"engine-{number}.log") as worker:
            while True:
                with self._lock:
                    following = next(left, None)
                if following is None:
                    return
                key, (case, seed) = following
                begun_s = time.monotonic()
                record = worker.run(_words(self._plan, case.words, seed), self._model)
                self._add(key, case, seed, record, time.monotonic() - begun_s)

    def _add(self, key: str, case: Case, seed: int, record: Record, wall_s: float) -> None:
        with self._lock:
            own = {"key": key, "words": list(case.words), "seed": seed, "code": self._code, "commit": self._commit}
            self._file.add({**record, **own})
            self._counts[0] += 1
            done, of = self._counts
            print(f"{done}/{of}: {case.name}, seed {seed}: {reward_last(record):.3f} ({wall_s:.0f} s)", flush=True)

    def _record(self, case: Case, seed: int) -> Record:
        return self._file[self._key(case, seed)]

    def _key(self, case: Case, seed: int) -> str:
        if (case, seed) not in self._keys:
            config = load(_words(self._plan, case.words, seed))[0]
            self._keys[case, seed] = run_key(config, self._model_hash, self._code)
        return self._keys[case, seed]


def case_figures(records: Sequence[Record]) -> dict[str, float]:
    """Means over the seeds of a case; `steps_to_target` is a median, and absent where most seeds did not get there."""
    reached = [steps_to_target(record["rewards"]) for record in records]
    last = [reward_last(record) for record in records]
    figures = {
        "reward_first": fmean(fmean(record["rewards"][:FIRST_STEPS]) for record in records),
        "reward_last": fmean(last),
        "reward_last_min": min(last),
        "reward_last_max": max(last),
        "steps_to_target": median(float("inf") if steps is None else steps for steps in reached),
    }
    if figures["steps_to_target"] == float("inf"):
        del figures["steps_to_target"]
    for name in ("held_out_greedy", "held_out_sampled", "staleness_mean", *STEP_FIGURES, "cpu_s"):
        known = [record[name] for record in records if record.get(name) is not None]
        figures |= {name: fmean(known)} if known else {}
    return figures | {"seeds": len(records)}


STEP_FIGURES = ("clip_fraction", "masked_fraction", "effective_fraction")
"""Means over all steps of a run, where the objective and the correction have them."""


def pair_figures(pairs: Iterable[tuple[Record, Record]]) -> dict[str, float]:
    """What asynchrony changes, in points of reward, with the 95% interval over the seeds.

    Args:
        pairs: for each seed the asynchronous run and the synchronous one.
    """
    both = list(pairs)
    figures: dict[str, float] = {}
    kinds = {"reward_final": reward_final, "held_out_sampled": lambda record: record.get("held_out_sampled")}
    for name, of in kinds.items():
        differences = [100 * (of(one) - of(other)) for one, other in both if of(one) is not None]
        if differences:
            mean, low, high = paired_difference(differences)
            figures |= {f"{name}_points": mean, f"{name}_low_points": low, f"{name}_high_points": high}
    return figures | {"seeds": len(both)}


def reward_last(record: Record) -> float:
    """Mean reward of the last steps."""
    return fmean(record["rewards"][-LAST_STEPS:])


def reward_final(record: Record) -> float:
    """Mean reward of the end of a run, over as many steps as pairs are compared by."""
    rewards = record["rewards"]
    return fmean(rewards[-max(1, min(FINAL_STEPS, len(rewards) // FINAL_SHARE)) :])


def steps_to_target(rewards: Sequence[float]) -> int | None:
    """Steps until the mean of the last five rewards reached the target; None when it never did."""
    for done in range(TARGET_STEPS, len(rewards) + 1):
        if fmean(rewards[done - TARGET_STEPS : done]) >= TARGET:
            return done
    return None


def _notes(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    notes = [
        f"Every token is exactly S steps old from step S on. Tables: objective and correction at S={BASE}; "
        f"reward_last is the mean of the last {LAST_STEPS} steps, steps_to_target the first at {TARGET:g}.",
        f"Pairs: the final reward is the mean of the last {FINAL_STEPS} steps, or of the last fifth if that is less.",
    ]
    for row in pairs:
        low, high = row["reward_final_low_points"], row["reward_final_high_points"]
        shown = "within" if low >= -AIM_POINTS and high <= AIM_POINTS else "NOT shown to be within"
        aim = f": {shown} {AIM_POINTS:g} points" if row["case"] == f"pairs/S={BASE}" else ""
        notes.append(
            f"{row['case'].removeprefix('pairs/')} against S={BASELINE}, {row['seeds']} paired seeds: final reward "
            f"{row['reward_final_points']:+.2f} points, 95% interval {low:+.2f} to {high:+.2f}{aim}."
        )
    return notes
