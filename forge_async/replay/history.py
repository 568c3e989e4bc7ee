"""Which events still count after a restoring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forge_async.core.errors import ForgeError
from forge_async.replay import events as ev
from forge_async.replay.events import Event


def surviving(events: Iterable[Event]) -> Sequence[Event]:
    """The history that still counts: each Restored(step) cuts out what happened after Trained(step - 1)."""
    kept: list[Event] = []
    ends: list[int] = [0]
    """Length of `kept` just after each step was trained; the entry of version 0 is the beginning."""
    for event in events:
        if isinstance(event, ev.Restored):
            if event.step >= len(ends):
                raise ForgeError(
                    f"The journal knows of {len(ends) - 1} steps done, so the run cannot go on from version "
                    f"{event.step}: resume from a checkpoint of step {len(ends) - 1} or less."
                )
            del kept[ends[event.step] :], ends[event.step + 1 :]
        elif isinstance(event, ev.Trained) and event.step == len(ends) - 1:
            kept.append(event)
            ends.append(len(kept))
            continue
        kept.append(event)
    return kept
