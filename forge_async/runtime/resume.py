"""Where a run that is continued goes on: its newest whole checkpoint, and the history that counts up to there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_async.core.errors import ConfigError
from forge_async.core.versions import PolicyVersion
from forge_async.observe import names
from forge_async.observe.group_events import EventsLog
from forge_async.observe.incidents import RESUMED, Incident
from forge_async.observe.run_directory import RunDirectory
from forge_async.observe.sinks import read_metrics
from forge_async.observe.summary import read_summary
from forge_async.pipeline.checkpoints import whole_checkpoints
from forge_async.pipeline.run_state import FILE_NAME, STATE_FOLDER, RunState
from forge_async.replay import events as ev
from forge_async.replay.history import ENDINGS, ended_groups, surviving
from forge_async.replay.journal import Journal

JOURNAL = "replay.jsonl"
PATIENCE_S = 20.0
"""How long the processes of a killed run may take to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where to go on."""

    version: PolicyVersion
    """What the learner begins with: a new incarnation."""
    checkpoint: Path | None
    """None: there is none yet, and the run begins again with its first version."""
    state: RunState | None
    """What the controller kept with the checkpoint."""
    ended: Collection[int]
    """Groups that had ended by then."""
    resumed_at: Sequence[int]
    """Steps at which the run was continued so far, this time included."""
    num_done: int
    """Steps that were done when the run ended."""
    num_begun: int
    """Groups that were begun and are made once more."""

    @property
    def state_folder(self) -> str:
        """What the learner reads; empty without a checkpoint."""
        return str(self.checkpoint / STATE_FOLDER) if self.checkpoint else ""

    @property
    def earlier_s(self) -> float:
        """Seconds that the run had taken by then."""
        return self.state.wall_s if self.state else 0.0


def find_resume_point(directory: RunDirectory, num_steps: int) -> ResumePoint:
    """Where the run in `directory` goes on, if it is to have `num_steps` steps.

    Raises ConfigError when these are done, ForgeError when its journal or its newest checkpoint cannot be read.
    """
    path = directory.journal / JOURNAL
    Journal.wait_until_free(path, PATIENCE_S)
    events, begun = _read(path)
    checkpoint = _newest(directory.checkpoints)
    state = RunState.read(checkpoint) if checkpoint else None
    step = state.step if state else 0
    if step >= num_steps:
        raise ConfigError(
            f"The run in {directory.path} has done all of its steps={num_steps}; give steps={step + 1} or more."
        )
    restores = [event for event in events if isinstance(event, ev.Restored)]
    incarnation = max((event.incarnation for event in restores), default=0) + 1
    ended = ended_groups(events, step)
    return ResumePoint(
        version=PolicyVersion(incarnation=incarnation, step=step),
        checkpoint=checkpoint,
        state=state,
        ended=ended,
        resumed_at=(*(event.step for event in restores), step),
        num_done=sum(isinstance(event, ev.Trained) for event in surviving(events)),
        num_begun=len(begun - ended),
    )


def note_resume(directory: RunDirectory, point: ResumePoint) -> None:
    """Put on record that the run had ended early and what that costs; call it before its records are rewound.

    A run that had done all of its steps is made longer, and nothing went wrong.
    """
    summary = read_summary(directory.summary) or {}
    status, error, wall_s = (summary.get(name) for name in ("status", "error", "wall_s"))
    if status == "completed":
        return
    end = f"{status}: {error}" if error else status or "killed, without a word"
    if wall_s is None:
        wall_s = next((row.get(names.TIME_S) for row in reversed(read_metrics(directory.metrics))), None)
    where = f"went on from the checkpoint after step {point.version.step}" if point.checkpoint else "began again"
    incident = Incident(
        kind=RESUMED,
        step=point.num_done,
        time_s=wall_s,
        text=f"The run ended ({end}) and {where}.",
        steps_again=point.num_done - point.version.step,
        groups_again=point.num_begun,
    )
    log = EventsLog(directory.events)
    log.write_incident(incident.kind, incident.record())
    log.close()


def _read(journal: Path) -> tuple[list[ev.Event], set[int]]:
    """The events of a journal that tell where a run may go on, and the groups begun since it was restored last."""
    events: list[ev.Event] = []
    begun: set[int] = set()
    for event in Journal.read(journal) if journal.exists() else ():
        if isinstance(event, ev.Started):
            begun.add(event.index)
        elif isinstance(event, ENDINGS):
            events.append(event)
            if isinstance(event, ev.Restored):
                begun.clear()
    return events, begun


def _newest(checkpoints: Path) -> Path | None:
    """The newest checkpoint from which a run can go on; a folder without the run's state is a model and no more."""
    found = [folder for folder in whole_checkpoints(checkpoints) if (folder / FILE_NAME).is_file()]
    return found[-1] if found else None
