"""Noticing an event loop that is blocked, and showing what blocks it.

A coroutine that computes or waits without `await` stops everything else on its loop: calls go unanswered and deadlines
pass unseen. A thread beside the loop asks it for a sign of life and, when none comes, reads the stack of the loop's
thread, which names the culprit.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable

FRAMES_SHOWN = 12
"""Innermost frames of the blocked thread that are shown."""


class LoopWatch:
    """Watches the event loop on which it is started, until `close`."""

    def __init__(
        self, name: str, warn: Callable[[str], None], *, blocked_after_s: float = 5.0, ask_every_s: float = 1.0
    ) -> None:
        """Args:
        name: whose loop it is.
        warn: called on the watching thread, with one sentence and the stack.
        blocked_after_s: a loop that gives no sign for so many seconds is blocked.
        ask_every_s: seconds between two questions.
        """
        self._name, self._warn = name, warn
        self._blocked_after_s, self._ask_every_s = blocked_after_s, ask_every_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> LoopWatch:
        """Watch the running loop, and return this object."""
        loop, thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(loop, thread_id), name="loop watch", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread_id: int) -> None:
        while not self._closed.wait(self._ask_every_s):
            answered = threading.Event()
            asked_s = time.monotonic()
            try:
                loop.call_soon_threadsafe(answered.set)
            except RuntimeError:  # the loop is closed
                return
            if not answered.wait(self._blocked_after_s):
                self._tell(thread_id, asked_s)
                self._wait_for_release(loop, answered, asked_s)

    def _tell(self, thread_id: int, asked_s: float) -> None:
        frame = sys._current_frames().get(thread_id)
        if frame is None or self._closed.is_set():
            return
        stack = "".join(traceback.format_stack(frame)[-FRAMES_SHOWN:])
        self._warn(
            f"The event loop of {self._name} has been blocked for {time.monotonic() - asked_s:.1f} s; its thread is "
            f"here (an await, or a thread of its own, would free it):\n{stack.rstrip()}"
        )

    def _wait_for_release(self, loop: asyncio.AbstractEventLoop, answered: threading.Event, asked_s: float) -> None:
        while not self._closed.is_set() and not loop.is_closed():
            if answered.wait(self._ask_every_s):
                self._warn(f"The event loop of {self._name} runs again, after {time.monotonic() - asked_s:.1f} s.")
                return
