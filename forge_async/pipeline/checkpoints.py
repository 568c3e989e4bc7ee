"""Checkpoints of a run: written whole, and the newest few kept, with the one where its best evaluation began.

A checkpoint is a Hugging Face folder. Beside the model it holds what the run needs to go on from there.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from forge_async.core.files import sync_tree
from forge_async.pipeline.ports import Learner
from forge_async.pipeline.run_state import STATE_FOLDER, RunState

PARTIAL = ".partial"
"""End of the name of a checkpoint that is being written."""
BEST_LINK = "best"
"""Symbolic link in the folder of checkpoints to the best of them."""


class Checkpoints:
    """Saves, judges and removes.

    A checkpoint is the learner as it was after its step, while an evaluation beside the loops is answered by whatever
    versions its replica has meanwhile: for the best checkpoint, those are told with its score.
    """

    def __init__(self, learner: Learner, folder: Path, *, keep: int, keep_best: bool) -> None:
        """`keep` is how many of the newest stay."""
        self._learner, self._folder, self._keep = learner, folder, keep
        self.keep_best = keep_best
        self.best: Path | None = None
        """The one whose evaluation scored best so far."""
        self._best_step: int | None = None
        self._best_score = float("-inf")

    async def save(self, state: RunState, awaited: Collection[int] = ()) -> Path:
        """Save the learner as it is after `state.step` steps, then remove what need not stay.

        The checkpoint gets its name when it is whole and with the disk, so that a run never goes on from half of one.
        `awaited` are the steps whose evaluations are on their way: any of them may turn out best.
        """
        folder = self._folder_of(state.step)
        partial = folder.with_name(folder.name + PARTIAL)
        await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)
        await self._learner.save(str(partial))
        await self._learner.save_state(str(partial / STATE_FOLDER))
        await asyncio.to_thread(_finish, partial, folder, state)
        await self.prune(awaited)
        return folder

    def recall(self, state: RunState) -> None:
        """Go on with the best checkpoint that an earlier process of the run knew."""
        if state.best_step is not None and state.best_score is not None:
            self.judge(state.best_step, state.best_score)

    @property
    def best_known(self) -> tuple[int | None, float | None]:
        """Step and score of the best checkpoint so far."""
        return self._best_step, None if self._best_step is None else self._best_score

    def judge(self, step: int, score: float) -> None:
        """Note the score of the evaluation that began at `step`; of equal scores the first stays best."""
        folder = self._folder_of(step)
        if self.keep_best and score > self._best_score and folder.is_dir():
            self.best, self._best_step, self._best_score = folder, step, score
            _point(self._folder / BEST_LINK, folder.name)

    async def prune(self, awaited: Collection[int] = ()) -> None:
        """Remove all that are neither among the newest nor the best nor `awaited`."""
        best = [] if self.best is None else [self.best.name]
        names = [folder.name for folder in whole_checkpoints(self._folder)]
        for name in superseded(names, self._keep, [*best, *(self._folder_of(step).name for step in awaited)]):
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    def _folder_of(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder of them, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal())


def _finish(partial: Path, folder: Path, state: RunState) -> None:
    state.write(partial)
    sync_tree(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync_tree(folder.parent, deep=False)


def superseded(names: Sequence[str], keep: int, others: Collection[str]) -> list[str]:
    """Names that are neither among the last `keep` nor among `others`, in order."""
    return [name for name in sorted(names)[:-keep] if name not in others]


def _point(link: Path, name: str) -> None:
    """Point a symbolic link to its neighbour `name`, at once."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name, target_is_directory=True)
        temporary.replace(link)
    except OSError:
        pass  # a file system without symbolic links; the summary names the folder too
