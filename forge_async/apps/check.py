"""`python -m forge_async.apps.check reward my.py:score [--prompts data.jsonl]`: probe a reward before a run uses it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.errors import ConfigError, ForgeError, one_sentence
from forge_async.prompt.jsonl import read_jsonl
from forge_async.reward.pool import ProcessRewardPool
from forge_async.reward.ports import RewardCall, RewardOutcome

MAX_PROMPTS = 8
"""Prompts of the file that are probed."""
ODD_COMPLETIONS = {
    "empty": "",
    "space": " ",
    "number": "42",
    "words": "The answer is 42.",
    "very long": "lorem ipsum " * 10_000,
    "unicode": "é漢字🙂\u202e\x00",
    "lines": "\n\n42\n",
}
"""What policies write sooner or later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One completion to be scored, and what is odd about it."""

    what: str
    call: RewardCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    what: str
    good: bool
    text: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit code: 0 the reward is fit, 1 it is not, 2 bad usage."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        probes = make_probes(options.prompts)
        passes = asyncio.run(score_three_times(options.reward, probes, options.timeout_s))
        return report(options.reward, probes, passes)
    except ForgeError as error:
        print(one_sentence(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence instead of printing the usage."""

    def error(self, message: str):
        raise ConfigError(f"{message}; usage: {self.format_usage().removeprefix('usage: ').strip()}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line. Raises ConfigError."""
    parser = _Parser(prog="python -m forge_async.apps.check", description=__doc__)
    parser.add_argument("what", choices=["reward"], help="what to check")
    parser.add_argument("reward", help="package.module:function or file.py:function")
    parser.add_argument("--prompts", default="", help="a .jsonl file whose fields the function needs")
    parser.add_argument("--timeout-s", type=float, default=10.0, help="longest time of one call, in seconds")
    options = parser.parse_args(argv)
    if not options.timeout_s > 0:
        raise ConfigError(f"--timeout-s={options.timeout_s:g} must be more than 0.")
    return options


def make_probes(prompts: str) -> list[Probe]:
    """Every prompt of the file (or one of our own) with odd completions, and with its own answer, whole and cut."""
    rows = [(row.text, dict(row.data)) for row in read_jsonl(prompts)[:MAX_PROMPTS]] if prompts else [("1+1=", {})]
    probes = []
    for text, data in rows:
        completions = ODD_COMPLETIONS | {f"its {key}": value for key, value in data.items() if isinstance(value, str)}
        for what, completion in completions.items():
            call = RewardCall(prompt=text, completion=completion, data=data)
            probes.append(Probe(what=what, call=call))
        probes.append(
            Probe(what="truncated", call=RewardCall(prompt=text, completion="The ans", data=data, truncated=True))
        )
    return probes


async def score_three_times(reference: str, probes: Sequence[Probe], timeout_s: float) -> list[list[RewardOutcome]]:
    """Twice in one process and once in another, which has other hash seeds and no memory of earlier calls.

    A hung call ends it, after the pass that it is in, or at once if it is the very first: waiting is all that is left.
    """
    calls = [probe.call for probe in probes]
    passes = []
    for times in (2, 1):
        pool = ProcessRewardPool(reference, timeout_s=timeout_s)
        await pool.start()
        try:
            for scored in [calls[:1], *[calls] * times] if not passes else [calls]:
                outcomes = await pool.score(scored)
                hung = any(outcome.error and outcome.error.kind == "hung" for outcome in outcomes)
                if hung or scored is calls:
                    passes.append(outcomes)
                if hung:
                    return passes
        finally:
            await pool.close()
    return passes


def report(reference: str, probes: Sequence[Probe], passes: Sequence[Sequence[RewardOutcome]]) -> int:
    """Print the table and the verdict; return the exit code. Raises ConfigError when prompts must be given first."""
    first = passes[0]
    if all(outcome.error and outcome.error.kind == "missing_data" for outcome in first) and first[0].error:
        raise ConfigError(
            f"{first[0].error.message.split(' [')[0]} Give --prompts FILE, whose lines have these fields."
        )
    findings = [faults(probes, passes), determinism(probes, passes), times(passes), rewards(first)]
    print(f"{reference}: {len(probes)} completions, scored {len(passes)} times")
    for finding in findings:
        print(f"  {finding.what:<14}{'ok' if finding.good else 'NOT OK':<8}{finding.text}")
    failed = [finding.what for finding in findings if not finding.good]
    print(f"Verdict: not fit for a run ({', '.join(failed)})." if failed else "Verdict: fit for a run.")
    return 1 if failed else 0


def faults(probes: Sequence[Probe], passes: Sequence[Sequence[RewardOutcome]]) -> Finding:
    """Whether every call gave a finite number."""
    pairs = [pair for run in passes for pair in zip(probes, run, strict=False)]  # a hung call may end a pass early
    found = [(probe, outcome.error) for probe, outcome in pairs if outcome.error]
    if not found:
        return Finding(what="completions", good=True, text="a finite number for every one")
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(error.kind for _, error in found).items())
    probe, error = found[0]
    return Finding(what="completions", good=False, text=f"{kinds}; on {probe.what}: {error.message}")


def determinism(probes: Sequence[Probe], passes: Sequence[Sequence[RewardOutcome]]) -> Finding:
    """Whether the same call gave the same number each time."""
    if len(passes) < 3:
        return Finding(what="determinism", good=False, text="not known, because a call hung")
    for number, probe in enumerate(probes):
        values = [run[number].value for run in passes]
        if values.count(values[0]) < len(values):
            where = "in one process" if values[0] != values[1] else "in another process"
            text = f"{values} for the same call {where} ({probe.what})"
            return Finding(what="determinism", good=False, text=text)
    return Finding(what="determinism", good=True, text="the same number each time, in another process too")


def times(passes: Sequence[Sequence[RewardOutcome]]) -> Finding:
    """How long calls took; a call that hung is among the faults already."""
    taken_ms = np.array([outcome.elapsed_s for run in passes for outcome in run]) * 1e3
    p50, p95 = np.percentile(taken_ms, [50, 95])
    return Finding(what="time", good=True, text=f"p50 {p50:.3g} ms, p95 {p95:.3g} ms, max {taken_ms.max():.3g} ms")


def rewards(outcomes: Sequence[RewardOutcome]) -> Finding:
    """The range of numbers seen; all equal is worth a remark, but odd completions may well all earn nothing."""
    values = [outcome.value for outcome in outcomes if outcome.value is not None]
    if not values:
        return Finding(what="range", good=False, text="no number seen")
    text = f"{min(values):g} to {max(values):g}"
    if min(values) == max(values):
        text += "; all equal, so nothing here could be learned: check with --prompts that a right answer earns more"
    return Finding(what="range", good=True, text=text)


if __name__ == "__main__":
    sys.exit(main())
