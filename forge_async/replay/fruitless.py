"""Notices a run that makes groups and can train on none of them."""

from __future__ import annotations

from collections import Counter

from forge_async.core.errors import FilterStallError


class FruitlessRun:
    """Groups that ended filtered or failed since one was last ready."""

    def __init__(self, groups_per_step: int, max_batches: int) -> None:
        """Args: P, and how many batches' worth of such groups are too many."""
        self._max_groups, self._max_batches = groups_per_step * max_batches, max_batches
        self._ends: Counter[tuple[str, str]] = Counter()

    def ready(self) -> None:
        """A group can be trained on: count anew."""
        self._ends.clear()

    def ended(self, outcome: str, reason: str) -> None:
        """A group ended without being trained on; only what a filter or a failure ended is counted."""
        if outcome in ("filtered", "failed"):
            self._ends[outcome, reason] += 1

    def check(self) -> None:
        """Raise FilterStallError, naming filters and counts, when there were too many in a row."""
        num_groups = self._ends.total()
        if num_groups < self._max_groups:
            return
        causes = ", ".join(f"{outcome} ({reason}): {num}" for (outcome, reason), num in self._ends.most_common())
        raise FilterStallError(
            f"No group could be trained on among the last {num_groups}, of which async.max_filtered_batches="
            f"{self._max_batches} batches are allowed ({causes}): loosen the filter, choose prompts whose rewards "
            "differ within a group, or raise async.max_filtered_batches."
        )
