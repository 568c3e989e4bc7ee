"""A learner whose parameters are copied out slowly while it takes its next step."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from forge_async.learner.batch import Share
from tests import backends

AFTER_BACKWARD_S = 0.3
"""How long the copy goes on after the backward pass: the step of the model of the tests takes less."""


@dataclass(frozen=True, kw_only=True)
class Overtaken:
    """What a copy turned out to be that a step was taken beside."""

    is_of_its_version: bool
    differs_from_the_next: bool
    copied_beside_backward: bool
    """Whether forward and backward were done while the copy was under way."""


class Overtaking:
    """Takes a step at once after a copy was begun, which does not even start before the backward pass is done."""

    def __init__(self, learner: Any) -> None:
        self._learner, self._backward = learner, threading.Event()
        if hasattr(learner, "_forward_backward"):
            inner = learner._forward_backward
            learner._forward_backward = lambda *args: (inner(*args), self._backward.set())[0]
        else:
            self._backward.set()

    def overtake(self, first: Share, second: Share) -> Overtaken:
        """Train on `first`, begin a copy, train on `second`."""
        learner, backwards = self._learner, []
        learner.train(first)
        version = learner.snapshot()[1].clone()
        if hasattr(learner, "_forward_backward"):
            self._backward.clear()

        def hold() -> None:
            backwards.append(self._backward.wait(10))
            time.sleep(AFTER_BACKWARD_S)

        with ThreadPoolExecutor(1) as copier:
            copier.submit(hold)
            copy = learner.begin_snapshot(copier)
            learner.train(second)
            blob = copy.result(timeout=10)[1]
        return Overtaken(
            is_of_its_version=bool((blob == version).all()),
            differs_from_the_next=bool((blob != learner.snapshot()[1]).any()),
            copied_beside_backward=backwards == [True],
        )


def titan_learner(folder: str, port: int, **settings: Any) -> Overtaking:
    """torchtitan's, on one rank."""
    return Overtaking(backends.titan_learner(folder, port, **settings))
