"""Which versions must stay readable: the newest few, and every one that somebody is reading."""

from __future__ import annotations

from collections import Counter

from forge_async.core.versions import PolicyVersion


class Retention:
    """Counts leases and tells what may be deleted. Pure bookkeeping; the caller deletes."""

    def __init__(self, keep: int) -> None:
        """`keep` newest versions are never deleted."""
        self._keep = keep
        self._live: list[PolicyVersion] = []
        self._leases: Counter[PolicyVersion] = Counter()

    @property
    def newest(self) -> PolicyVersion | None:
        """The newest published version."""
        return self._live[-1] if self._live else None

    def published(self, version: PolicyVersion) -> None:
        """Note a committed version."""
        self._live = sorted({*self._live, version})

    def lease(self, version: PolicyVersion) -> None:
        """A reader begins; the version stays until as many releases."""
        self._leases[version] += 1

    def release(self, version: PolicyVersion) -> None:
        """A reader ended, well or not."""
        self._leases[version] -= 1
        if self._leases[version] <= 0:
            del self._leases[version]

    def take_deletable(self) -> list[PolicyVersion]:
        """Versions that may be deleted now, oldest first; each is returned once."""
        deletable = [version for version in self._live[: -self._keep] if version not in self._leases]
        self._live = [version for version in self._live if version not in deletable]
        return deletable
