"""Several observers of the ring as one."""

from __future__ import annotations

from collections.abc import Sequence

from forge_async.pipeline.ports import Admission, GroupRecord, LearnerStep, Pull
from forge_async.pipeline.publish import Publication
from forge_async.pipeline.ring import Observer


class Observers:
    """Tells each of them, in order; what one raises ends the run."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None:
        for observer in self._observers:
            observer.admitted(admissions, replica)

    def made(self, records: Sequence[GroupRecord]) -> None:
        for observer in self._observers:
            observer.made(records)

    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None:
        for observer in self._observers:
            observer.stepped(step, ranks)

    def published(self, publication: Publication) -> None:
        for observer in self._observers:
            observer.published(publication)

    def pulled(self, replica: str, pull: Pull) -> None:
        for observer in self._observers:
            observer.pulled(replica, pull)


class Deaf:
    """Observes nothing; a base for observers that want to hear of little."""

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None: ...
    def made(self, records: Sequence[GroupRecord]) -> None: ...
    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None: ...
    def published(self, publication: Publication) -> None: ...
    def pulled(self, replica: str, pull: Pull) -> None: ...
