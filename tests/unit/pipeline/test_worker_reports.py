"""Reports that come with groups are taken in place of asking, and nothing of them is told twice or lost."""

import dataclasses

from forge_async.pipeline.ports import WorkerReport
from forge_async.pipeline.worker_reports import FRESH_S, WorkerReports, together


def report(number, **more):
    """The number-th report of a worker, with a figure of its own in every field."""
    span = ("score", "work", float(number), 0.5, None)
    fields = {
        "score_s": 0.5, "spans": (span,), "rss_bytes": 100 * number, "cpu_s": float(number), "num_cut": 1,
        "num_salvaged": 2, "num_oversize": 3, "num_unknown_tokens": 4, "reference_s": 0.25,
    }  # fmt: skip
    return WorkerReport(**(fields | more))


def test_reports_that_follow_each_other_add_up_and_the_process_is_told_as_it_is_now():
    both = together(report(1), report(2))
    assert both == WorkerReport(
        score_s=1.0, spans=report(1).spans + report(2).spans, rss_bytes=200, cpu_s=2.0, num_cut=2, num_salvaged=4,
        num_oversize=6, num_unknown_tokens=8, reference_s=0.5,
    )  # fmt: skip
    assert {field.name for field in dataclasses.fields(both)} == {
        "score_s", "spans", "rss_bytes", "cpu_s", "num_cut", "num_salvaged", "num_oversize", "num_unknown_tokens",
        "reference_s",
    }, "a further figure is to be added up too"  # fmt: skip
    assert together(report(1, reference_s=None), report(2, reference_s=None)).reference_s is None


def test_what_came_lately_is_taken_once():
    now = [10.0]
    reports = WorkerReports(lambda: now[0])
    assert reports.take(0) is None, "nothing has come yet"
    reports.note(0, report(1))
    reports.note(0, report(2))
    reports.note(1, report(7))
    assert reports.take(0) == together(report(1), report(2))
    empty = reports.take(0)
    assert empty == WorkerReport(score_s=0.0, spans=(), rss_bytes=200, cpu_s=2.0, reference_s=0.0)
    reports.note(0, report(3))
    assert reports.take(0) == report(3)
    assert reports.take(1) == report(7)


def test_what_is_too_old_is_told_with_what_is_asked_for():
    now = [10.0]
    reports = WorkerReports(lambda: now[0])
    reports.note(0, report(1))
    now[0] += FRESH_S + 0.1
    assert reports.take(0) is None
    assert reports.take_with(0, report(2)) == together(report(1), report(2))
    assert reports.take(0) is None
    assert reports.take_with(0, report(3)) == report(3), "told once"
