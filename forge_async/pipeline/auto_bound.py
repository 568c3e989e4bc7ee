"""`async.max_staleness=auto`: measures the ring's stages and says when the bound should move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from forge_async.pipeline.observers import Deaf
from forge_async.pipeline.ports import Admission, GroupRecord, LearnerStep, Pull
from forge_async.pipeline.publish import Publication
from forge_async.replay.auto_staleness import AutoStaleness, BoundMove


class AutoBound(Deaf):
    """An observer of the ring that feeds the controller of the replay room."""

    def __init__(self, auto: AutoStaleness, now_s: Callable[[], float] = time.time) -> None:
        """`now_s` is the wall clock that the records of groups are stamped with."""
        self._auto, self._now_s = auto, now_s
        self._admitted_s: dict[int, float] = {}
        self._publish_s = 0.0
        self._stepped_s = now_s()
        self._move: BoundMove | None = None

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None:
        now_s = self._now_s()
        self._admitted_s.update({admission.index: now_s for admission in admissions})

    def made(self, records: Sequence[GroupRecord]) -> None:
        for record in records:
            admitted_s = self._admitted_s.pop(record.index, None)
            if admitted_s is not None and record.generated_s is not None and record.scored_s is not None:
                self._auto.observe_group(record.generated_s - admitted_s, record.scored_s - record.generated_s)

    def published(self, publication: Publication) -> None:
        self._publish_s = publication.duration_s

    def pulled(self, replica: str, pull: Pull) -> None:
        self._auto.observe_sync(self._publish_s, pull.fetch_s + pull.pause_s)

    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None:
        now_s = self._now_s()
        step_s, self._stepped_s = now_s - self._stepped_s, now_s
        self._move = self._auto.observe_step(step_s, max(rank.wait_data_s for rank in ranks)) or self._move

    def take_move(self) -> BoundMove | None:
        """The move that was called for since the last call."""
        move, self._move = self._move, None
        return move
