"""A learner whose parameters are copied out slowly while it takes its next step."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forge_async.learner.batch import Share
from tests import backends

LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Overtaken:
    """What a copy turned out to be that a step was taken beside."""

    is_of_its_version: bool
    differs_from_the_next: bool
    copied_beside_backward: bool
    """Whether forward and backward were done while the copy was under way."""


class Overtaking:
    """Takes a step at once after a copy was begun. The copy itself waits until the step waits for it, or is done."""

    def __init__(self, learner: Any) -> None:
        self._learner, self._is_begun = learner, False
        self._backward, self._next_move = threading.Event(), threading.Event()
        self._has_backward = hasattr(learner, "_forward_backward")
        if self._has_backward:
            inner = learner._forward_backward
            learner._forward_backward = lambda *args: (inner(*args), self._backward.set())[0]
        wait = learner._copy_out.wait
        learner._copy_out.wait = lambda: (self._note_wait(), wait())[1]

    def overtake(self, first: Share, second: Share) -> Overtaken:
        """Train on `first`, begin a copy, train on `second`."""
        learner, seen = self._learner, []
        learner.train(first)
        version = learner.snapshot()[1].clone()
        self._backward.clear()

        def hold() -> None:
            seen.append(self._next_move.wait(LIMIT_S) and (self._backward.is_set() or not self._has_backward))

        with ThreadPoolExecutor(1) as copier:
            copier.submit(hold)
            copy = learner.begin_snapshot(copier)
            self._is_begun = True
            learner.train(second)
            self._next_move.set()
            blob = copy.result(LIMIT_S)[1]
        return Overtaken(
            is_of_its_version=bool((blob == version).all()),
            differs_from_the_next=bool((blob != learner.snapshot()[1]).any()),
            copied_beside_backward=seen == [True],
        )

    def _note_wait(self) -> None:
        if self._is_begun:
            self._next_move.set()


def titan_learner(folder: str, port: int, **settings: Any) -> Overtaking:
    """torchtitan's, on one rank."""
    return Overtaking(backends.titan_learner(folder, port, **settings))
