"""Which versions others build on: such a one is deleted only after all of them."""

from __future__ import annotations

from forge_async.core.versions import PolicyVersion


class Bases:
    """Bookkeeping of one publisher; the caller deletes."""

    def __init__(self) -> None:
        self._base_of: dict[PolicyVersion, PolicyVersion | None] = {}
        """Every live version that was published from here."""
        self._awaiting: set[PolicyVersion] = set()
        """Versions that should go, and on which a live one builds."""

    def published(self, version: PolicyVersion, base: PolicyVersion | None) -> None:
        """Note a version, and the one that it builds on."""
        self._base_of[version] = base

    def knows(self, version: PolicyVersion) -> bool:
        """Whether it was published from here and is still there."""
        return version in self._base_of

    def retire(self, version: PolicyVersion) -> list[PolicyVersion]:
        """What may be deleted now that nobody needs `version` for itself, in order."""
        self._awaiting.add(version)
        deletable: list[PolicyVersion] = []
        for each in sorted(self._awaiting, reverse=True):
            if each not in self._base_of.values():
                self._base_of.pop(each, None)
                self._awaiting.discard(each)
                deletable.append(each)
        return deletable
