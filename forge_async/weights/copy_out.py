"""Copying parameters out beside the next forward and backward pass; only what changes them waits for the copy."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Any, TypeVar

from forge_async.core.errors import LearnerError

T = TypeVar("T")
LIMIT_S = 600.0
"""Longest time of a copy, which is one pass over memory."""


class CopyOut:
    """The copy that is on its way, if there is one. Called from one thread, which also changes what is copied."""

    def __init__(self) -> None:
        self._running: Future[Any] | None = None

    def begin(self, copier: Executor, copy: Callable[[], T]) -> Future[T]:
        """Have `copier` run a function that only reads the parameters, after the copy before it."""
        self.wait()
        self._running = copier.submit(copy)
        return self._running

    def wait(self) -> None:
        """Wait until the parameters may be changed. A copy that failed tells whoever asks for its result.

        Raises LearnerError when that takes longer than LIMIT_S.
        """
        if self._running is None:
            return
        if wait([self._running], LIMIT_S).not_done:
            raise LearnerError(
                f"Copying the parameters out took more than {LIMIT_S:g} s; is the store's memory being swapped to disk?"
            )
        self._running = None
