"""Which events still count after a restoring."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from forge_async.core.errors import ForgeError
from forge_async.replay import events as ev
from forge_async.replay.events import Event

ENDINGS = (ev.Ended, ev.Taken, ev.Trained, ev.Restored)
"""What `ended_groups` looks at; the other events may be left out."""


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


def ended_groups(events: Iterable[Event], step: int) -> set[int]:
    """Admission indices of the groups that had ended when version `step` came to be, in the history that counts.

    Raises ForgeError when the history ends before that version.
    """
    beginning = ev.Restored(step=step, incarnation=0, num_attempts=0)
    ended: set[int] = set()
    taken: dict[int, tuple[int, ...]] = {}
    for event in surviving(itertools.chain(events, [beginning])):
        if isinstance(event, ev.Ended):
            ended.add(event.index)
        elif isinstance(event, ev.Taken):
            taken[event.step] = event.indices
        elif isinstance(event, ev.Trained):
            ended.update(taken.pop(event.step, ()))
    return ended


def failed_tries(events: Iterable[Event]) -> Mapping[int, int]:
    """How many tries of each group came to nothing, in all histories: what was undone was tried all the same.

    A try counts when its group had to wait again, when its replica went before its tokens were all made, and when it
    was in flight as the run crashed. A run that was closed did not crash: what it had in flight is nobody's fault.
    """
    failed: Counter[int] = Counter()
    in_flight: dict[int, str] = {}
    for event in events:
        if isinstance(event, ev.Started):
            in_flight[event.index] = event.replica
        elif isinstance(event, (ev.Ready, ev.Ended)):
            in_flight.pop(event.index, None)
        elif isinstance(event, ev.Requeued):
            in_flight.pop(event.index, None)
            failed[event.index] += 1
        elif isinstance(event, ev.Closed):
            in_flight.clear()
        elif isinstance(event, (ev.ReplicaLeft, ev.Restored)):
            lost = [*in_flight] if isinstance(event, ev.Restored) else _lost_with(event, in_flight)
            failed.update(lost)
            for index in lost:
                del in_flight[index]
    failed.update(list(in_flight))
    return failed


def _lost_with(event: ev.ReplicaLeft, in_flight: dict[int, str]) -> list[int]:
    """The groups that have to wait again because their replica is gone; the others are nobody's from then on."""
    for index in event.made:
        if in_flight.get(index) == event.replica:
            in_flight[index] = ""
    return [index for index, replica in in_flight.items() if replica == event.replica]
