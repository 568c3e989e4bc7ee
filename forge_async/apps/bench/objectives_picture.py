"""The pictures of `bench objectives`: how each S learns, and where each case ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from forge_async.observe.dot_chart import DotRow, dot_chart
from forge_async.observe.run_directory import write_atomically
from forge_async.observe.svg import Series, line_chart

SMOOTHED_STEPS = 5
"""Steps that a point of a curve is the mean of."""
KINDS = ("objective", "correction", "S")
"""First words of the cases, in the order of their colours."""

Courses = Mapping[str, Sequence[Sequence[float]]]
"""`S=2` -> for each seed its rewards by step."""


def write_pictures(courses: Courses, ends: Mapping[str, Sequence[float]], folder: Path) -> list[Path]:
    """Draw what there is into `folder`; returns the files.

    Args:
        courses: of each S.
        ends: case -> its final reward with each seed.
        folder: exists.
    """
    drawn: dict[str, str] = {}
    if courses:
        drawn["reward_by_staleness.svg"] = curves(courses)
    if ends:
        drawn["reward_by_case.svg"] = dots(ends)
    for name, picture in drawn.items():
        write_atomically(folder / name, picture + "\n")
    return [folder / name for name in drawn]


def curves(courses: Courses) -> str:
    """Reward over steps, a line for each S: means over its seeds and over some steps."""
    num_steps = min(len(rewards) for runs in courses.values() for rewards in runs)
    ends = range(SMOOTHED_STEPS, num_steps + 1, SMOOTHED_STEPS) if num_steps >= SMOOTHED_STEPS else [num_steps]
    series = [
        Series(
            label=f"{name} ({len(runs)})",
            values=[fmean(r for run in runs for r in run[max(0, end - SMOOTHED_STEPS) : end]) for end in ends],
        )
        for name, runs in courses.items()
    ]
    return line_chart(list(ends), series, y_label=f"reward, mean of {SMOOTHED_STEPS} steps", y_top=1.0)


def dots(ends: Mapping[str, Sequence[float]]) -> str:
    """Final reward of each case, a dot for each seed and one for their mean."""
    rows = [
        DotRow(label=case, values=values, colour=KINDS.index(case.partition("/")[0].partition("=")[0]))
        for case, values in ends.items()
    ]
    return dot_chart(rows, x_label="reward, mean of the last 10 steps")
