"""Law 7: a run that was killed goes on from its checkpoint, and nothing is lost or done twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from e2e.runs import Finished, descendants, finish, nothing_left, run, start, wait_for_steps

from forge_async.replay import events as ev
from forge_async.replay.history import surviving
from forge_async.replay.journal import Journal

STEPS = 8
WORDS = [
    "task.name=sum", f"steps={STEPS}", "groups_per_step=8", "group_size=4", "checkpoint.every_steps=3", "seed=3",
    "eval.num_prompts=0", "optimizer.lr=0.002",
]  # fmt: skip


def killed_and_resumed(tmp_path: Path, words: list[str], *, kill_after: int, more: list[str]) -> Finished:
    """Kill a run's controller after some steps, as a machine's death would, and go on at once."""
    folder = tmp_path / "run"
    process = start(tmp_path, [*words, f"run.dir={folder}"])
    wait_for_steps(folder, kill_after, process)
    pids = {process.pid, *descendants(process.pid)}
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    resumed = finish(start(tmp_path, [f"run.dir={folder}", "run.resume=true", *more]), folder)
    nothing_left(pids)
    return resumed


@pytest.mark.stack
@pytest.mark.timeout(400)
def test_a_synchronous_run_that_was_killed_ends_with_the_weights_that_it_would_have_had(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = [*WORDS, f"model.path={tiny_model}", "async.max_staleness=0"]
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole", words)
    assert whole.code == 0, whole.output
    resumed = killed_and_resumed(tmp_path, words, kill_after=4, more=[])
    assert resumed.code == 0, resumed.output
    [goes_on] = resumed.summary["resumed_at"]
    assert goes_on in (3, 6)
    [incident] = resumed.incidents
    assert incident["event"] == "resumed" and incident["step"] >= 4
    assert incident.get("steps_again", 0) == incident["step"] - goes_on
    assert "killed, without a word" in resumed.page and "went wrong" not in whole.page
    assert f"resuming after step {goes_on}, from {resumed.folder}/checkpoints/step-00000{goes_on}" in resumed.output
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    same = ("step", "reward/mean", "loss", "grad_norm", "tokens/trained", "groups/trained", "groups/filtered")
    assert [[row[name] for name in same] for row in resumed.rows] == [
        [row[name] for name in same] for row in whole.rows
    ]
    assert len(resumed.rows) == resumed.summary["steps"] == STEPS
    times_s = [row["time_s"] for row in resumed.rows]
    assert times_s == sorted(times_s), "the run's clock goes on"
    ends = [{event["index"]: event["outcome"] for event in each.events} for each in (resumed, whole)]
    assert ends[0] == ends[1]


@pytest.mark.stack
@pytest.mark.timeout(300)
def test_an_asynchronous_run_that_was_killed_loses_no_prompt_and_trains_none_twice(
    tmp_path: Path, tiny_model: Path
) -> None:
    words = [*WORDS, f"model.path={tiny_model}", "async.max_staleness=2"]
    resumed = killed_and_resumed(tmp_path, words, kill_after=4, more=["steps=9", "policy.replicas=2"])
    assert resumed.code == 0, resumed.output
    assert [row["step"] for row in resumed.rows] == list(range(1, 10))
    assert max(row["staleness/max"] for row in resumed.rows) <= 2
    told = Counter(event["index"] for event in resumed.events)
    assert set(told.values()) == {1}, "every group is told once"
    events = surviving(Journal.read(resumed.folder / "journal" / "replay.jsonl"))
    ids = {event.index: event.prompt_id for event in events if isinstance(event, ev.Admitted)}
    admitted = [(index, id.epoch, id.index) for index, id in ids.items()]
    assert admitted == [(index, 0, index) for index in range(len(told))], "no prompt is skipped or drawn twice"
    # A batch that had been taken ahead of the step before the checkpoint's was never trained on: it is taken once more.
    taken = {event.step: event.indices for event in events if isinstance(event, ev.Taken)}
    trained = Counter(index for event in events if isinstance(event, ev.Trained) for index in taken[event.step])
    assert set(trained.values()) == {1} and len(trained) == 9 * 8
    outcomes = Counter(event["outcome"] for event in resumed.events)
    assert outcomes["trained"] == resumed.summary["groups/trained"] == 9 * 8
    again = finish(start(tmp_path, [f"run.dir={resumed.folder}", "run.resume=true"]), resumed.folder)
    assert again.code == 2 and "has done all of its steps=9; give steps=10 or more" in again.output
    assert again.summary == resumed.summary, "a refusal takes nothing away"
