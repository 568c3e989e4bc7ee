"""Stops a run that goes on and on without anything to learn from."""

from __future__ import annotations

from collections.abc import Sequence

from forge_async.core.errors import FilterStallError
from forge_async.pipeline.observers import Deaf
from forge_async.pipeline.ports import LearnerStep

ZERO_FRACTION = "advantage/zero_fraction"
"""Figure of a step: share of the batch's samples whose advantages are all 0."""


class NoSignal(Deaf):
    """Counts steps in a row whose every advantage is 0.

    Where such groups are ended as filtered instead (`advantage.zero_variance=refill`), no batch comes to be, and the
    replay room counts them.
    """

    def __init__(self, max_batches: int) -> None:
        """`max_batches`: as `async.max_filtered_batches`."""
        self._max_batches, self._num = max_batches, 0

    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None:
        """Raises FilterStallError when there were too many."""
        figures = ranks[0].result.figures
        self._num = self._num + 1 if figures.get(ZERO_FRACTION, 0.0) >= 1.0 else 0
        if self._num >= self._max_batches:
            raise FilterStallError(
                f"The last {self._num} batches had nothing to learn from: within every group all rewards were equal, "
                f"so that every advantage is 0 (async.max_filtered_batches={self._max_batches}). Choose prompts that "
                "the model solves sometimes, raise group_size or sampling.temperature, or check the reward with "
                "`python -m forge_async.apps.check reward`."
            )
