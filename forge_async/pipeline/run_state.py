"""What the controller itself must remember of a run that goes on from a checkpoint; it lies beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forge_async.core.errors import ForgeError

FILE_NAME = "run.json"
STATE_FOLDER = "state"
"""Folder in a checkpoint that holds what the learner needs to go on."""
SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run after a number of steps."""

    step: int
    """Steps done."""
    wall_s: float
    """Seconds that the run took so far, what earlier processes of it took included."""
    eval_before: float | None = None
    """Score on held-out prompts before the first step."""
    evaluations: Sequence[Mapping[str, Any]] = ()
    """Evaluations that had ended, as the summary tells them."""
    best_step: int | None = None
    """Step of the best checkpoint so far."""
    best_score: float | None = None
    """Its score."""

    def write(self, folder: Path) -> None:
        """Write into a checkpoint."""
        (folder / FILE_NAME).write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> RunState:
        """Read from a checkpoint. Raises ForgeError for a damaged file, or one of another version."""
        path = folder / FILE_NAME
        try:
            record = json.loads(path.read_text())
            if record.pop("schema") != SCHEMA:
                raise ForgeError(f"{path} was written by another version of forge_async; go on with that one.")
            return cls(**record)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ForgeError(
                f"{path} cannot be read ({error}); delete its folder to go on from the checkpoint before."
            ) from error

    def has_evaluated(self, step: int) -> bool:
        """Whether an evaluation that was asked for after `step` steps had ended."""
        return any(found["step"] == step for found in self.evaluations)
