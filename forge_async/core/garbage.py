"""Keeping the garbage collector away from what a process keeps for good."""

from __future__ import annotations

import gc


def settle_heap() -> None:
    """Collect once, and have later collections leave alone all that is there now. Call when start-up is over.

    The stack's libraries leave hundreds of thousands of objects behind that live as long as their process. Every full
    collection walks all of them, for 0.1 s and more, and nothing else runs there meanwhile: in the middle of a step.
    What is settled is still freed when nothing refers to it; a dead cycle of it would stay.
    """
    gc.collect()
    gc.freeze()
