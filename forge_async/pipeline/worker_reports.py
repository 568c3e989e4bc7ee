"""What rollout workers did, as it comes with the groups that they made: they are asked only where steps are long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from forge_async.pipeline.ports import WorkerReport

FRESH_S = 1.0
"""A report that came so lately is as good as one that is asked for."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    report: WorkerReport
    """All of a worker since it was last taken."""
    noted_s: float


class WorkerReports:
    """Keeps what came until somebody takes it."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is the clock by which reports age."""
        self._now_s, self._kept = now_s, dict[int, _Kept]()

    def note(self, worker: int, report: WorkerReport) -> None:
        """A worker's report of what happened since its last one."""
        kept = self._kept.get(worker)
        self._kept[worker] = _Kept(report=together(kept.report, report) if kept else report, noted_s=self._now_s())

    def take(self, worker: int) -> WorkerReport | None:
        """What was noted since the last taking; None where that is too old, and the worker is to be asked."""
        kept = self._kept.get(worker)
        if kept is None or self._now_s() - kept.noted_s > FRESH_S:
            return None
        taken, kept.report = kept.report, _nothing_since(kept.report)
        return taken

    def take_with(self, worker: int, report: WorkerReport) -> WorkerReport:
        """The same together with what a worker answered that was asked."""
        self.note(worker, report)
        return self._kept.pop(worker).report


def together(earlier: WorkerReport, later: WorkerReport) -> WorkerReport:
    """Two reports that follow each other as one."""
    return replace(
        later,
        score_s=earlier.score_s + later.score_s,
        spans=earlier.spans + later.spans,
        num_cut=earlier.num_cut + later.num_cut,
        num_salvaged=earlier.num_salvaged + later.num_salvaged,
        num_oversize=earlier.num_oversize + later.num_oversize,
        num_unknown_tokens=earlier.num_unknown_tokens + later.num_unknown_tokens,
        reference_s=None if later.reference_s is None else (earlier.reference_s or 0.0) + later.reference_s,
    )


def _nothing_since(report: WorkerReport) -> WorkerReport:
    """A report of the same process at the same time, in which nothing happened."""
    return WorkerReport(
        score_s=0.0,
        spans=(),
        rss_bytes=report.rss_bytes,
        cpu_s=report.cpu_s,
        reference_s=None if report.reference_s is None else 0.0,
    )
