"""Which checkpoints of a run are kept: the newest few, and the one where its best evaluation began."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from forge_async.pipeline.ports import Learner

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
        self._best_score = float("-inf")

    async def save(self, step: int, awaited: Collection[int] = ()) -> Path:
        """Save the learner as it is after `step` steps, then remove what need not stay.

        `awaited` are the steps whose evaluations are on their way: any of them may turn out best.
        """
        folder = self._folder_of(step)
        await self._learner.save(str(folder))
        await self.prune(awaited)
        return folder

    def judge(self, step: int, score: float) -> None:
        """Note the score of the evaluation that began at `step`; of equal scores the first stays best."""
        folder = self._folder_of(step)
        if self.keep_best and score > self._best_score and folder.is_dir():
            self.best, self._best_score = folder, score
            _point(self._folder / BEST_LINK, folder.name)

    async def prune(self, awaited: Collection[int] = ()) -> None:
        """Remove all that are neither among the newest nor the best nor `awaited`."""
        best = [] if self.best is None else [self.best.name]
        names = [folder.name for folder in self._folder.glob("step-*") if folder.suffix != ".partial"]
        for name in superseded(names, self._keep, [*best, *(self._folder_of(step).name for step in awaited)]):
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    def _folder_of(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"


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
