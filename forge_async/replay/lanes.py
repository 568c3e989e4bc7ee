"""The lanes that groups go through: all with one bound on age, or a share of each batch kept fresh beside the rest.

A lane has its own queue, its own room and its own part of every batch; `docs/staleness.md` says what that costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from forge_async.core.errors import ConfigError
from forge_async.replay.bound import UNLIMITED, Bound, effective, num_fresh
from forge_async.replay.settings import AsyncSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One queue with its bound."""

    fresh: bool
    """Whether its groups must be made wholly by the version that trains on them."""
    bound: Bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """All queues of a run."""

    normal: Lane
    fresh: Lane | None
    """None without `async.fresh_fraction`."""

    @classmethod
    def of(cls, settings: AsyncSettings, groups_per_step: int) -> Lanes:
        """The lanes that the dials ask for. Raises ConfigError for what cannot work."""
        normal, num = effective(settings, groups_per_step), num_fresh(settings, groups_per_step)
        fresh = Bound(max_staleness=0, window=1, groups_per_step=num, publish_every=1) if num else None
        return cls(
            normal=Lane(fresh=False, bound=normal),
            fresh=None if fresh is None else Lane(fresh=True, bound=fresh),
        )

    def __iter__(self) -> Iterator[Lane]:
        """The lanes in the order in which replicas are given their groups: a step waits longest for the fresh."""
        if self.fresh is not None:
            yield self.fresh
        yield self.normal

    @property
    def groups_per_step(self) -> int:
        """P, over all lanes."""
        return sum(lane.bound.groups_per_step for lane in self)

    @property
    def depth(self) -> int:
        """Most groups that may be untaken, over all lanes; UNLIMITED for `stream`."""
        return min(UNLIMITED, sum(lane.bound.depth for lane in self))

    @property
    def synchronous(self) -> bool:
        """True at S = 0, where groups are admitted in rounds."""
        return self.normal.bound.synchronous

    def with_max_staleness(self, max_staleness: int) -> Lanes:
        """The lanes under another S. Raises ConfigError when window or publishing leave no room under it."""
        if not self.normal.bound.bounded:
            raise ConfigError(f"max_staleness={max_staleness} cannot be set in a run with async.buffer=stream.")
        if self.fresh is not None and max_staleness == 0:
            raise ConfigError("max_staleness=0 cannot be set in a run with async.fresh_fraction; set 1 or more.")
        bound = dataclasses.replace(self.normal.bound, max_staleness=max_staleness)
        return Lanes(normal=Lane(fresh=False, bound=bound), fresh=self.fresh)
