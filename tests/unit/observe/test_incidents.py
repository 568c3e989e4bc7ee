"""Whatever went wrong and was mended stands in one list: in the report, the summary and the last lines of a run."""

from __future__ import annotations

import io
from pathlib import Path

from forge_async.observe import names, report
from forge_async.observe.group_events import EventsLog, read_incidents
from forge_async.observe.incidents import (
    DELTA_REPLACED,
    GROUPS_EXPIRED,
    GROUPS_FAILED,
    GROUPS_REQUEUED,
    GROUPS_STALE,
    KINDS,
    RESUMED,
    ROLLOUTS_CUT,
    SINK_DISABLED,
    STORE_RESTARTED,
    Incident,
    incidents_of,
    tell,
)
from forge_async.observe.progress import Progress
from forge_async.observe.report import write_report
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import JsonlSink
from forge_async.observe.summary import RunFacts, write_summary
from tests.unit.observe.test_observe_summary_and_report import metrics_row, parse

HEADING = "What went wrong, and was mended"
RESTARTS = [
    Incident(kind=STORE_RESTARTED, step=3, time_s=12.0, text="store (pid 7) <died>. Another took its place."),
    Incident(kind=STORE_RESTARTED, step=41, time_s=100.0, text="store (pid 9) died. Another took its place."),
]


def written(path: Path, incidents: list[Incident], **figures: float) -> RunDirectory:
    """A run of three steps; `figures` stand in the row of the second."""
    run = RunDirectory.create(path, config="")
    sink, log = JsonlSink(run.metrics), EventsLog(run.events)
    for step in (1, 2, 3):
        sink.write(step, metrics_row(step, **(figures if step == 2 else {})))
    for incident in incidents:
        log.write_incident(incident.kind, incident.record())
    sink.close()
    log.close()
    return run


def test_an_incident_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    incidents = [*RESTARTS, Incident(kind=RESUMED, step=9, steps_again=2, groups_again=17), Incident(kind="odd")]
    run = written(tmp_path / "run", incidents)
    assert [Incident.of(line) for line in read_incidents(run.events)] == incidents
    assert incidents[-1].record() == {}, "what says nothing is not written"


def test_figures_of_another_kind_count_as_not_told() -> None:
    line = {"event": STORE_RESTARTED, "step": "three", "time_s": None, "text": None, "cause": "killed"}
    assert Incident.of(line) == Incident(kind=STORE_RESTARTED)


def test_incidents_of_a_kind_are_told_together() -> None:
    [told] = tell(RESTARTS)
    assert told.what == KINDS[STORE_RESTARTED].title
    assert (told.times, told.first_step, told.last_step, told.first_s, told.last_s) == (2, 3, 41, 12.0, 100.0)
    assert told.line == (
        "mended: the weight store died and another took its place (twice, between steps 3 and 41); lost: nothing"
    )


def test_what_was_lost_is_summed() -> None:
    resumed = [Incident(kind=RESUMED, step=step, steps_again=again, groups_again=9) for step, again in ((4, 1), (6, 2))]
    [told] = tell([*resumed, Incident(kind=RESUMED)])
    assert (told.times, told.lost) == (3, "3 steps done again, 18 groups made again")
    assert tell([Incident(kind=SINK_DISABLED)])[0].lost == KINDS[SINK_DISABLED].lost


def test_what_the_metrics_count_is_an_incident_too() -> None:
    rows = [metrics_row(1), metrics_row(2, **{names.ROLLOUTS_CUT: 3, names.GROUPS_FAILED: 1})]
    cut, failed = incidents_of([], rows)
    assert cut == Incident(kind=ROLLOUTS_CUT, step=2, time_s=14.0, times=3, rollouts_lost=3)
    assert failed == Incident(kind=GROUPS_FAILED, step=2, time_s=14.0, groups_lost=1)
    assert [told.lost for told in tell([cut, failed])] == ["3 rollouts", "1 group"]
    row = metrics_row(4, **{names.GROUPS_EXPIRED: 1, names.GROUPS_REQUEUED: 5, names.GROUPS_STALE: 2})
    assert {told.kind: (told.times, told.lost) for told in tell(incidents_of([], [row]))} == {
        GROUPS_REQUEUED: (5, "5 groups made again"),
        GROUPS_STALE: (2, "nothing"),
        GROUPS_EXPIRED: (1, "1 group"),
    }


def test_kinds_stand_in_their_order_and_one_that_is_not_known_last_by_its_own_name() -> None:
    told = tell([Incident(kind="tape_torn"), *RESTARTS, Incident(kind=RESUMED), Incident(kind=DELTA_REPLACED)])
    assert [each.kind for each in told] == [RESUMED, STORE_RESTARTED, DELTA_REPLACED, "tape_torn"]
    assert told[-1].line == "mended: tape torn (once); lost: nothing"


def test_the_report_the_summary_and_the_last_lines_tell_of_them(tmp_path: Path) -> None:
    run = written(tmp_path / "run", RESTARTS, **{names.ROLLOUTS_CUT: 2})
    summary = write_summary(run, RunFacts(status="completed", wall_s=120.0))
    _, words = parse(write_report(run))
    assert words.index(HEADING) < words.index("Progress")
    for expected in (
        "The weight store died and another took its place", "twice", "between steps 3 and 41 (12 s to 1 min 40 s)",
        "nothing", "Rollouts took longer than rollout.timeout_s and were cut off", "after step 2 (14 s)", "2 rollouts",
        "store (pid 7) <died>.",
    ):  # fmt: skip
        assert expected in words
    assert [(each["kind"], each["times"], each["lost"]) for each in summary["incidents"]] == [
        (STORE_RESTARTED, 2, "nothing"),
        (ROLLOUTS_CUT, 2, "2 rollouts"),
    ]
    stream = io.StringIO()
    Progress(3, stream, mode="off").finish(summary, run.report)
    lines = stream.getvalue().splitlines()
    assert lines[1:3] == [
        each.line for each in tell([*RESTARTS, *incidents_of([], [metrics_row(2, **{names.ROLLOUTS_CUT: 2})])])
    ]
    assert lines[-1].startswith("report: ")


def test_where_nothing_went_wrong_nothing_is_said_of_it(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [])
    summary = write_summary(run, RunFacts(status="completed", wall_s=120.0))
    assert summary["incidents"] == []
    assert HEADING not in parse(write_report(run))[1]
    stream = io.StringIO()
    Progress(3, stream, mode="off").finish(summary, run.report)
    assert "mended" not in stream.getvalue()


def test_of_many_the_first_and_the_last_are_shown_one_by_one(tmp_path: Path) -> None:
    many = [Incident(kind=DELTA_REPLACED, step=at, time_s=at, text=f"delta {at} damaged") for at in range(100)]
    _, words = parse(write_report(written(tmp_path / "run", many)))
    shown = [at for at in range(100) if f"delta {at} damaged" in words]
    half = report.MAX_INCIDENTS // 2
    assert shown == [*range(half), *range(100 - half, 100)]
    assert "100 times" in words
