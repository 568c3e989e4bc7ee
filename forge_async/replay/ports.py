"""What the loops ask of replay. The actor and the tests' fake implement it under one contract suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from forge_async.core.records import Group
from forge_async.replay.admission import Admission


class Replay(Protocol):
    """Bounded depth and age between rollouts and learner. Every call is idempotent by group index or step.

    `admit` and `take` wait; they raise StallError, saying what they waited for, after `timeout_s` seconds.
    """

    async def add_replica(self, replica: str, step: int) -> None:
        """A replica that serves version `step` joins and may be given groups."""
        ...

    async def remove_replica(self, replica: str) -> None:
        """A replica is gone; its unfinished groups go to others. Do not `end` a group because its replica died."""
        ...

    async def admit(self, replica: str, max_groups: int, timeout_s: float) -> list[Admission]:
        """Wait until the replica may be given a group, and return up to `max_groups`; empty once closed."""
        ...

    async def put(self, groups: Sequence[Group]) -> int:
        """Hand in scored groups, as many as are ready; returns how many were new."""
        ...

    async def end(self, index: int, outcome: str, reason: str, attempt: int | None = None) -> bool:
        """End a group that is not to be trained on: `filtered`, `failed`, `expired` or `cancelled`."""
        ...

    async def retry(self, index: int, reason: str, attempt: int) -> bool:
        """A try came to nothing: make the group anew, or end it as failed when its tries are used up."""
        ...

    async def take(self, step: int, timeout_s: float) -> list[Group]:
        """Wait for the batch of step `step`, sorted by admission index; the same batch when asked again."""
        ...

    async def trained(self, step: int) -> None:
        """The update of step `step` is done."""
        ...

    async def published(self, step: int) -> None:
        """Version `step` can be pulled."""
        ...

    async def pulled(self, replica: str, step: int) -> None:
        """The replica makes no token of a version below `step` any more: call it after the swap, not after the copy."""
        ...

    async def set_max_staleness(self, max_staleness: int) -> None:
        """Start groups under another bound on age from here on; those under way keep theirs."""
        ...

    async def state(self) -> dict[str, float]:
        """Figures under the names of `metrics.jsonl`."""
        ...

    async def close(self, reason: str) -> None:
        """Cancel what has not ended, wake all who wait, and close the journal."""
        ...
