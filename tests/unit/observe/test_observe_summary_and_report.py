import io
import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forge_async.core.errors import ForgeError
from forge_async.observe import names, report
from forge_async.observe.group_events import EventsLog, GroupEvent
from forge_async.observe.progress import Progress, duration
from forge_async.observe.report import write_report
from forge_async.observe.rollout_log import RolloutLog, RolloutRecord
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import JsonlSink
from forge_async.observe.stages import StageTimes, advice, stage_times, step_seconds
from forge_async.observe.summary import RunFacts, read_summary, summarise, write_summary
from forge_async.observe.svg import Series, line_chart, nice_ticks

PROMISED = {
    "status", "error", "steps", "wall_s", "startup_s", "eval/before", "eval/after", "reward/first", "reward/last",
    "staleness/max", "staleness/bound", "overlap/ideal_step_s", "overlap/step_s", "overlap/fraction_of_ideal",
    "bottleneck", "weights_sha256", "groups/admitted", "groups/trained", "groups/filtered", "groups/failed",
    "groups/expired", "groups/cancelled",
}  # fmt: skip


def metrics_row(step, **changes):
    row = dict.fromkeys(names.REQUIRED, 0.0) | {"step": step, "time_s": 10.0 + 2.0 * step, "reward/mean": step / 100}
    row |= {"staleness/max": min(step - 1, 2), "policy/busy_fraction": 0.9, "learner/busy_fraction": 0.5}
    return row | {"weights/publish_s": 0.1, "weights/pull_s": 0.1, "groups/trained": 4} | changes


def facts(**changes):
    return RunFacts(**{"status": "completed", "wall_s": 60.0, "max_staleness": 2, **changes})


# -- stages and summary


def test_the_ideal_step_is_the_slowest_stage_or_the_chain_spread_over_the_batches_in_flight():
    times = StageTimes(generation=1.0, scoring=0.2, training=0.8, weights=0.1)
    assert times.ideal_step_s(0) == pytest.approx(2.1)
    assert times.ideal_step_s(1) == pytest.approx(1.05)
    assert times.ideal_step_s(2) == times.ideal_step_s(None) == 1.0
    assert times.slowest() == "generation"
    assert StageTimes().slowest() is None


def test_stage_times_prefer_measured_seconds_to_busy_fractions():
    row = {"policy/busy_fraction": 0.5, "learner/busy_fraction": 0.25, "stage/training_s": 3.0, "weights/pull_s": 0.5}
    assert stage_times(row, 2.0) == StageTimes(generation=1.0, scoring=0.0, training=3.0, weights=0.5)
    assert stage_times({"policy/busy_fraction": None}, None) == StageTimes()


def test_step_seconds_come_from_the_row_or_from_the_clock():
    rows = [{"time_s": 5.0}, {"time_s": 7.0}, {"time_s": 9.0, "step_s": 1.5}, {"time_s": 1.0}, {}]
    assert step_seconds(rows) == [None, 2.0, 1.5, None, None]


@pytest.mark.parametrize(
    ("times", "bound", "expected"),
    [
        (StageTimes(generation=1.0, training=0.2), 2, "generation is the slowest stage: add policy replicas"),
        (StageTimes(training=1.0), 2, "training is the slowest stage: add learner ranks"),
        (StageTimes(weights=1.0), None, "weights is the slowest stage: publish less often"),
        (StageTimes(generation=1.0, training=0.9), 0, "stages take turns at async.max_staleness=0"),
        (StageTimes(generation=1.0, scoring=0.9, training=0.9), 1, "raise async.max_staleness"),
        (StageTimes(), 2, ""),
    ],
)
def test_the_advice_names_stage_and_remedy(times, bound, expected):
    line = advice(times, bound)
    assert expected in line
    assert bool(expected) == bool(line)


def test_a_summary_has_the_promised_keys_and_figures():
    rows = [metrics_row(step) for step in range(1, 41)]
    events = [{"outcome": "trained"}] * 7 + [{"outcome": "filtered"}] * 2
    summary = summarise(facts(startup={"policy": 18.2}, eval_before=0.5, eval_after=0.9), rows, events)
    assert set(summary) >= PROMISED
    assert summary["reward/first"] == pytest.approx(0.03)
    assert summary["reward/last"] == pytest.approx(0.355)
    assert (summary["steps"], summary["staleness/max"], summary["staleness/bound"]) == (40, 2, 2)
    assert (summary["groups/admitted"], summary["groups/trained"], summary["groups/filtered"]) == (9, 7, 2)
    assert summary["overlap/step_s"] == 2.0
    assert summary["overlap/ideal_step_s"] == pytest.approx(1.8)
    assert summary["overlap/fraction_of_ideal"] == pytest.approx(0.9)
    assert summary["bottleneck"] == "generation"
    assert summary["startup/policy_s"] == 18.2


def test_a_summary_of_nothing_has_the_promised_keys_too():
    summary = summarise(facts(status="failed", error="no weights", max_staleness=None), [], [])
    assert set(summary) >= PROMISED
    assert summary["error"] == "no weights"
    assert summary["steps"] == 0
    assert summary["reward/first"] is summary["overlap/fraction_of_ideal"] is summary["bottleneck"] is None


def test_group_totals_are_the_ledgers_where_it_answers_else_those_of_the_rows():
    assert summarise(facts(groups={"admitted": 5, "trained": 3}), [], [])["groups/trained"] == 3
    assert summarise(facts(), [metrics_row(1), metrics_row(2)], [])["groups/trained"] == 8


def test_rewards_that_are_null_do_not_count():
    rows = [metrics_row(1, **{"reward/mean": None}), metrics_row(2)]
    assert summarise(facts(), rows, [])["reward/first"] == pytest.approx(0.02)


def test_an_unknown_status_is_refused():
    with pytest.raises(ForgeError, match="'done'"):
        facts(status="done")


# -- the report


class Page(HTMLParser):
    """Collects tags and text, and what would load something from outside or run a script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.outside = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.outside += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]

    def handle_data(self, data):
        self.words.append(data)


def parse(path):
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text.replace("<!DOCTYPE html>", ""))
    page = Page(text)
    assert not page.outside
    assert "script" not in page.tags
    assert not re.search(r'[" ](nan|inf)\b', text)
    return page, " ".join(page.words)


def fill(run, steps):
    sink, events, rollouts = JsonlSink(run.metrics), EventsLog(run.events), RolloutLog(run.rollouts)
    for step in range(1, steps + 1):
        sink.write(
            step, metrics_row(step, **({"loss": float("nan"), "reward/mean": float("nan")} if step == 2 else {}))
        )
        event = {"index": step, "prompt_id": "sums:0:1", "admitted_s": 0.0, "ended_s": 1.0}
        events.write([GroupEvent(**event, outcome="filtered", reason="zero <variance>")])
        rollouts.write(
            [RolloutRecord(step=step, group=1, prompt="<script>alert(1)</script>&", completion="\x00<b>", reward=1.0)]
        )
    for log in (sink, events, rollouts):
        log.close()


def test_a_complete_run_reports_itself_escaped(tmp_path):
    run = RunDirectory.create(tmp_path / "run", config="task: <sums> & more\n")
    fill(run, steps=30)
    write_summary(run, facts(startup={"policy <0>": 18.2}, startup_s=20.0, eval_before=0.5, eval_after=0.9))
    page, words = parse(write_report(run))
    assert page.tags.count("svg") == 5
    for expected in ("completed", "<script>alert(1)</script>&", "\\x00<b>", "zero <variance>", "policy <0>", "& more"):
        assert expected in words
    assert "learner step" in words
    assert "time (s)" in words


def test_a_failed_run_shows_its_cause(tmp_path):
    run = RunDirectory.create(tmp_path / "run", config="seed: 0\n")
    fill(run, steps=2)
    write_summary(run, facts(status="failed", error="policy_0 <died>"))
    assert json.loads(run.summary.read_text())["status"] == "failed"
    assert "policy_0 <died>" in parse(write_report(run))[1]


def test_a_run_without_summary_or_with_torn_files_can_be_drawn(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    assert "Nothing was recorded." in parse(write_report(run))[1]
    fill(run, steps=1)
    run.metrics.write_bytes(run.metrics.read_bytes() + b'{"step": 2, "los')
    run.rollouts.write_bytes(run.rollouts.read_bytes()[:-3])
    run.summary.write_text('{"status": ')
    assert "running" in parse(write_report(run))[1]


def test_a_report_shows_the_first_and_last_rollouts(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_ROLLOUTS", 4)
    run = RunDirectory.create(tmp_path / "run")
    fill(run, steps=9)
    assert [row["step"] for row in report.load(run).rollouts] == [1, 2, 8, 9]


def test_charts_are_valid_for_any_data():
    for values in ([0.0], [None, 1.0, None], [-5.0, 5.0, 1e9], [1e-9] * 4, [float(at) for at in range(5000)]):
        x = [float(at) for at in range(len(values))]
        chart = line_chart(x, [Series(label="<a>", values=values)], y_label="b & c", bound=("limit", 2.0))
        ElementTree.fromstring(chart)
        assert len(chart) < 60_000
    assert line_chart([1.0], [Series(label="a", values=[None])], y_label="y").startswith("<p")


def test_ticks_are_round_and_enclose_the_data():
    assert nice_ticks(0.0, 0.93) == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    for low, high in [(0, 1e-7), (-3, 17), (0, 192), (5, 5.01)]:
        ticks = nice_ticks(low, high)
        assert ticks[0] <= low + 1e-12
        assert ticks[-1] >= high - 1e-12
        assert 2 <= len(ticks) <= 8


def test_the_summary_is_read_back_or_absent(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    assert read_summary(run.summary) is None
    written = write_summary(run, facts(wall_s=float("inf")))
    assert read_summary(run.summary) == {**written, "wall_s": None}


# -- progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Ticks:
    def __init__(self):
        self.time_s = 0.0

    def __call__(self):
        return self.time_s


def test_lines_come_now_and_then_and_at_the_end():
    stream, clock = io.StringIO(), Ticks()
    progress = Progress(20, stream, every_s=5.0, now_s=clock, max_staleness=2)
    progress.phase("policy ready", 18.2)
    progress.waiting("a batch from replay")
    for step in range(1, 21):
        clock.time_s += 1.0
        progress.step(metrics_row(step, **{"queue/depth": 9, "queue/capacity": 192, "step_s": 1.0}))
    lines = stream.getvalue().splitlines()
    assert lines[0].split() == ["policy", "ready", "18.2", "s"]
    assert [line[:10] for line in lines[1:]] == ["step  1/20", "step  6/20", "step 11/20", "step 16/20", "step 20/20"]
    assert "staleness 0/2" in lines[1]
    assert "queue   9/192" in lines[1]
    assert "slowest generation" in lines[1]
    assert "1.00 s/step" in lines[1]
    assert lines[1].endswith("19 s left")
    assert lines[-1].endswith("0.0 s left")


def test_a_terminal_has_one_live_line_that_fits(monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    stream, clock = Terminal(), Ticks()
    progress = Progress(100, stream, now_s=clock)
    progress.waiting("the first batch")
    for step in (1, 2):
        clock.time_s += 0.5
        progress.step(metrics_row(step))
    progress.say("a policy was replaced")
    progress.step(metrics_row(3))
    progress.finish({"status": "completed", "steps": 3, "wall_s": 3.0}, Path("runs/a/report.html"))
    text = stream.getvalue()
    assert text.count("\n") == 4, "the message, the end of the live line, and two closing lines"
    assert all(len(part.split("\x1b")[0]) < 72 for part in text.split("\r"))
    assert "step   1/100  reward 0.010  staleness 0  - s/step  - left" in text
    assert "0.50 s/step" in text
    assert text.endswith("report: runs/a/report.html\n")


def test_a_failed_run_ends_with_its_cause_and_an_off_display_shows_only_the_end():
    stream = io.StringIO()
    progress = Progress(10, stream, mode="off")
    progress.phase("policy", 1.0)
    progress.step(metrics_row(1))
    summary = summarise(facts(status="failed", error="policy_0 died.", startup_s=2.0), [metrics_row(1)], [])
    progress.finish(summary, Path("runs/a/report.html"))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("1 step in 1 min 00 s (start-up 2.0 s), reward 0.010 -> 0.010")
    assert lines[-2:] == ["report: runs/a/report.html", "failed: policy_0 died."]


def test_durations_read_well():
    assert [duration(s) for s in (0.0, 9.94, 9.96, 59.6, 185.0, 7620.0)] == [
        "0.0 s", "9.9 s", "10 s", "1 min 00 s", "3 min 05 s", "2 h 07 min",
    ]  # fmt: skip


def test_waiting_for_the_reference_service_is_a_part_of_scoring():
    row = {"reward/busy_fraction": 0.25, "reference/busy_fraction": 0.5, "learner/busy_fraction": 0.6}
    times = stage_times(row, 2.0)
    assert times.scoring == 1.5 and times.slowest() == "scoring"
