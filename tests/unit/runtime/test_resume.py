"""Where a run goes on: checkpoint, incarnation and the groups that had ended."""

from __future__ import annotations

import fcntl
import io
from pathlib import Path

import pytest

from forge_async.config import compose
from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.records import PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.observe.group_events import read_incidents
from forge_async.observe.progress import Progress
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import JsonlSink
from forge_async.observe.summary import RunFacts, write_summary
from forge_async.pipeline.run_state import RunState
from forge_async.replay import events as ev
from forge_async.replay.journal import Journal
from forge_async.runtime import resume
from forge_async.runtime.launch import Launch
from forge_async.runtime.resume import JOURNAL, find_resume_point, note_resume


def make_run(tmp_path: Path, events: list[ev.Event], checkpoints: tuple[int, ...]) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "run", config="")
    journal = Journal.open(run.journal / JOURNAL)
    journal.append(events)
    journal.close()
    for step in checkpoints:
        folder = run.checkpoints / f"step-{step:06d}"
        folder.mkdir()
        RunState(step=step, wall_s=10.0 * step).write(folder)
    return run


def step_events(step: int) -> list[ev.Event]:
    """Three groups a step, of which one is filtered."""
    first = 3 * step
    admitted = [
        ev.Admitted(index=index, prompt_id=PromptId(source="s", epoch=0, index=index), num_tokens=1)
        for index in range(first, first + 3)
    ]
    ended = [ev.Ended(index=first + 1, outcome="filtered", reason="zero_variance")]
    return [*admitted, *ended, ev.Taken(step=step, indices=(first, first + 2)), ev.Trained(step=step)]


HISTORY = [event for step in range(4) for event in step_events(step)]


def test_a_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, [*HISTORY, ev.Closed(reason="done")], (1, 3))
    for name in ("step-000004.partial", "step-000005"):
        (run.checkpoints / name).mkdir()
    point = find_resume_point(run, 10)
    assert point.version == PolicyVersion(incarnation=1, step=3)
    assert point.checkpoint == run.checkpoints / "step-000003"
    assert point.state_folder == str(run.checkpoints / "step-000003" / "state")
    assert (point.earlier_s, point.resumed_at) == (30.0, (3,))
    assert point.ended == set(range(9)), "those of step 3 are made again"


def test_each_time_is_another_incarnation(tmp_path: Path) -> None:
    again = [
        ev.Restored(step=3, incarnation=1, num_attempts=9),
        *step_events(3),
        ev.Restored(step=1, incarnation=2, num_attempts=12),
    ]
    point = find_resume_point(make_run(tmp_path, [*HISTORY, *again], (1,)), 10)
    assert (point.version, point.resumed_at) == (PolicyVersion(incarnation=3, step=1), (3, 1, 1))
    assert point.ended == {0, 1, 2}


@pytest.mark.parametrize("events", [[], HISTORY[:2]])
def test_without_a_checkpoint_it_begins_again(tmp_path: Path, events: list[ev.Event]) -> None:
    point = find_resume_point(make_run(tmp_path, events, ()), 10)
    assert (point.version.step, point.checkpoint, point.state_folder, point.earlier_s) == (0, None, "", 0.0)
    assert not point.ended


def test_a_run_that_has_done_its_steps_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, HISTORY, (4,))
    with pytest.raises(ConfigError, match="done all of its steps=4; give steps=5 or more"):
        find_resume_point(run, 4)
    assert find_resume_point(run, 5).version.step == 4


def test_a_journal_that_lost_what_the_checkpoint_knows_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="knows of 4 steps done, so the run cannot go on from version 6"):
        find_resume_point(make_run(tmp_path, HISTORY, (6,)), 10)


def test_a_process_of_the_run_that_still_lives_is_waited_for_and_then_named(tmp_path: Path, monkeypatch) -> None:
    run = make_run(tmp_path, HISTORY, (1,))
    monkeypatch.setattr(resume, "PATIENCE_S", 0.2)
    with (run.journal / JOURNAL).open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ForgeError, match="still lives; end it"):
            find_resume_point(run, 10)
    assert find_resume_point(run, 10).version.step == 1


def begun(*indices: int) -> list[ev.Event]:
    return [ev.Started(index=index, replica="policy_0", step=0) for index in indices]


def test_groups_that_were_begun_and_had_not_ended_are_counted_as_made_again(tmp_path: Path) -> None:
    events = [*begun(*range(14)), *HISTORY]
    point = find_resume_point(make_run(tmp_path, events, (3,)), 10)
    assert (point.num_done, point.num_begun) == (4, 5), "three of step 3, and two that it had not come to"


def test_what_an_earlier_resume_made_again_is_not_counted_twice(tmp_path: Path) -> None:
    events = [*begun(*range(14)), *HISTORY, ev.Restored(step=3, incarnation=1, num_attempts=14), *begun(9)]
    point = find_resume_point(make_run(tmp_path, events, (3,)), 10)
    assert (point.num_done, point.num_begun) == (3, 1)


@pytest.mark.parametrize(
    ("facts", "text", "time_s"),
    [
        (None, "killed, without a word", 44.0),
        (RunFacts(status="interrupted", wall_s=50.0), "interrupted", 50.0),
        (RunFacts(status="failed", error="policy_0 died.", wall_s=50.0), "failed: policy_0 died.", 50.0),
    ],
)
def test_an_early_end_is_put_on_record_with_what_is_done_again(
    tmp_path: Path, facts: RunFacts | None, text: str, time_s: float
) -> None:
    run = make_run(tmp_path, [*begun(*range(14)), *HISTORY], (3,))
    sink = JsonlSink(run.metrics)
    sink.write(4, {"time_s": 44.0})
    sink.close()
    if facts is not None:
        write_summary(run, facts)
    note_resume(run, find_resume_point(run, 10))
    assert read_incidents(run.events) == [
        {
            "event": "resumed", "step": 4, "time_s": time_s, "steps_again": 1, "groups_again": 5,
            "text": f"The run ended ({text}) and went on from the checkpoint after step 3.",
        }
    ]  # fmt: skip


def test_without_a_checkpoint_all_of_it_is_done_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, HISTORY, ())
    note_resume(run, find_resume_point(run, 10))
    [incident] = read_incidents(run.events)
    assert incident["text"] == "The run ended (killed, without a word) and began again."
    assert incident["steps_again"] == 4 and "time_s" not in incident


def test_a_resumed_run_that_ends_before_its_next_checkpoint_still_says_where_to_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, HISTORY, (3,))
    config, progress = compose(), Progress(10, io.StringIO())
    launch = Launch(config, tmp_path, run, progress, 0.0, find_resume_point(run, 10))
    assert launch.last_checkpoint == run.checkpoints / "step-000003"
    launch.result.checkpoint = run.checkpoints / "step-000006"
    assert launch.last_checkpoint == launch.result.checkpoint
    assert Launch(config, tmp_path, run, progress, 0.0).last_checkpoint is None


def test_a_run_that_is_made_longer_had_not_gone_wrong(tmp_path: Path) -> None:
    run = make_run(tmp_path, HISTORY, (4,))
    write_summary(run, RunFacts(status="completed", wall_s=50.0))
    note_resume(run, find_resume_point(run, 10))
    assert not run.events.exists()
