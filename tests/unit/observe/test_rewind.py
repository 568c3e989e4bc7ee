"""Records of a run that goes on tell every step and every group once."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from forge_async.observe.group_events import EventsLog, GroupEvent, read_events, read_incidents
from forge_async.observe.jsonl import read_jsonl
from forge_async.observe.rewind import rewind
from forge_async.observe.rollout_log import RolloutLog, RolloutRecord, read_rollouts
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import JsonlSink, read_metrics
from forge_async.observe.summary import RunFacts, write_summary


def written(path: Path) -> RunDirectory:
    run = RunDirectory.create(path, config="")
    sink, events, rollouts = JsonlSink(run.metrics), EventsLog(run.events), RolloutLog(run.rollouts)
    for step in range(1, 5):
        sink.write(step, {"loss": 1 / step})
        rollouts.write([RolloutRecord(step=step, group=step - 1, prompt="1+1=", completion="é", reward=1.0)])
        events.write(
            [GroupEvent(index=step - 1, prompt_id=f"s:0:{step}", admitted_s=0, ended_s=step, outcome="trained")]
        )
    for part in (sink, events, rollouts):
        part.close()
    run.summary.write_text("{}")
    run.report.write_text("")
    run.trace.write_text("[]")
    return run


def test_what_came_after_the_checkpoint_is_taken_back(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 5, "lo')
    rewind(run, 2, {0, 1})
    assert [row["step"] for row in read_metrics(run.metrics)] == [1, 2]
    assert run.metrics.read_text().count("\n") == 2
    assert [event["index"] for event in read_events(run.events)] == [0, 1]
    assert [(record["step"], record["completion"]) for record in read_rollouts(run.rollouts)] == [(1, "é"), (2, "é")]
    assert not run.summary.exists() and not run.report.exists()
    assert run.trace.exists()
    log = RolloutLog(run.rollouts)
    log.write([RolloutRecord(step=3, group=7, prompt="", completion="", reward=0.0)])
    log.close()
    assert [record["step"] for record in read_rollouts(run.rollouts)] == [1, 2, 3]


def test_what_befell_the_run_itself_is_not_taken_back(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    log = EventsLog(run.events)
    log.write_incident("store_restarted", {"number": 1})
    log.close()
    rewind(run, 2, {0, 1})
    assert [event["index"] for event in read_events(run.events)] == [0, 1]
    assert read_incidents(run.events, "store_restarted") == [{"event": "store_restarted", "number": 1}]
    assert write_summary(run, RunFacts(status="completed", wall_s=1.0))["weights/store_restarts"] == 1


def test_long_records_are_never_in_memory_whole(tmp_path: Path) -> None:
    run, text = RunDirectory.create(tmp_path / "run", config=""), "x" * 10_000
    sink, rollouts = JsonlSink(run.metrics), RolloutLog(run.rollouts)
    for step in range(1, 2001):
        sink.write(step, {"note": text})
        rollouts.write([RolloutRecord(step=step, group=step, prompt=text, completion="", reward=1.0)])
    sink.close()
    rollouts.close()
    tracemalloc.start()
    try:
        rewind(run, 1999, ())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 10_000_000, "each file has 20 MB of text"
    for path, read in ((run.metrics, read_jsonl), (run.rollouts, read_rollouts)):
        assert [row["step"] for row in read(path)] == list(range(1, 2000))


def test_nothing_is_rewritten_when_all_of_it_counts(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    before = [path.stat().st_ino for path in (run.metrics, run.events, run.rollouts)]
    rewind(run, 4, range(4))
    assert [path.stat().st_ino for path in (run.metrics, run.events, run.rollouts)] == before


def test_a_run_that_wrote_nothing_yet_begins_again(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", config="")
    rewind(run, 0, ())
    again = written(tmp_path / "other")
    rewind(again, 0, ())
    assert not read_metrics(again.metrics) and not read_events(again.events) and not list(read_rollouts(again.rollouts))
