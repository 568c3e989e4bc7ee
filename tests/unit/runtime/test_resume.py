"""Where a run goes on: checkpoint, incarnation and the groups that had ended."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from forge_async.core.errors import ConfigError, ForgeError
from forge_async.core.records import PromptId
from forge_async.core.versions import PolicyVersion
from forge_async.observe.run_directory import RunDirectory
from forge_async.pipeline.run_state import RunState
from forge_async.replay import events as ev
from forge_async.replay.journal import Journal
from forge_async.runtime import resume
from forge_async.runtime.resume import JOURNAL, find_resume_point


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
