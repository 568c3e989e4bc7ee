"""Which versions must stay readable: the newest few, all that somebody reads, and what these are built on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from forge_async.core.versions import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A version that has become readable, as whoever keeps the books sees it."""

    num_bytes: int
    """What was stored for it."""
    needs: frozenset[PolicyVersion] = frozenset()
    """The versions without which its deltas mean nothing."""
    num_elements: int = 0
    """Elements that were compared with the version before; 0 when it is whole."""
    num_changed: int = 0
    """Those among them whose bits differ."""


class Retention:
    """Counts leases and tells what may be deleted. Pure bookkeeping; the caller deletes."""

    def __init__(self, keep: int) -> None:
        """`keep` newest versions are never deleted."""
        self._keep = keep
        self._live: list[PolicyVersion] = []
        self._leases: Counter[PolicyVersion] = Counter()
        self._needs: dict[PolicyVersion, frozenset[PolicyVersion]] = {}

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest published version."""
        return self._live[-1] if self._live else None

    def is_whole(self, version: PolicyVersion) -> bool:
        """Whether a published version can be read without any other."""
        return not self._needs[version]

    def holds(self, version: PolicyVersion) -> bool:
        """Whether a version is published and not deleted."""
        return version in self._needs

    def lost(self) -> None:
        """All versions are gone, with their store. Who began to read one still releases it."""
        self._live.clear()
        self._needs.clear()

    def published(self, version: PolicyVersion, needs: frozenset[PolicyVersion] = frozenset()) -> None:
        """Note a committed version, or one that was committed again, and all that it is built on."""
        self._live = sorted({*self._live, version})
        self._needs[version] = needs

    def lease(self, version: PolicyVersion) -> None:
        """A reader begins; the version stays until as many releases."""
        self._leases[version] += 1

    def release(self, version: PolicyVersion) -> None:
        """A reader ended, well or not."""
        self._leases[version] -= 1
        if self._leases[version] <= 0:
            del self._leases[version]

    def take_deletable(self, coming: int = 0) -> list[PolicyVersion]:
        """Versions that may be deleted now, each returned once: newest first, so that none is left without what it is
        built on when the deletion breaks off.

        `coming`: with so many published first. The newest one that is there stays, to be read until then.
        """
        used = {*self._live[-max(self._keep - coming, 1) :], *self._leases}
        used |= {base for version in used for base in self._needs.get(version, ())}
        deletable = [version for version in reversed(self._live) if version not in used]
        for version in deletable:
            self._live.remove(version)
            del self._needs[version]
        return deletable
