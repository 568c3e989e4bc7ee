"""What a learner rank has copied out of its parameters: to be published, or published last."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from forge_async.core.errors import LearnerError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Part, Probe

Copy = Future[tuple[Part, Any]]
"""A part and its blob, once they are copied out."""


class Snapshots:
    """Copies by version. The one published last stays until the next: a new store, in place of one that died, begins
    with its bits, for the optimiser may have changed the parameters since."""

    def __init__(self, *, keeps_last: bool) -> None:
        """`keeps_last`: whether a snapshot may be asked for again, until the next one is."""
        self._keeps_last = keeps_last
        self._waiting: dict[PolicyVersion, Copy] = {}
        self._last: tuple[PolicyVersion, Copy] | None = None
        self._probes: dict[PolicyVersion, Probe] = {}
        """Of the versions that wait, and of the one that was taken last."""

    def __len__(self) -> int:
        """How many wait to be published."""
        return len(self._waiting)

    def add(self, version: PolicyVersion, copy: Copy, probe: Probe | None = None) -> None:
        """A copy is on its way; the probe is of the same parameters."""
        self._waiting[version] = copy
        if probe is not None:
            self._probes[version] = probe

    def probe(self, version: PolicyVersion) -> Probe | None:
        """The probe of a version that waits or was taken last, if it has one."""
        return self._probes.get(version)

    def waiting(self, version: PolicyVersion) -> Copy:
        """A copy that was added and not taken."""
        return self._waiting[version]

    def take(self, version: PolicyVersion) -> Copy:
        """A copy to be published, for the first time or once more. Raises LearnerError when there is none."""
        if version in self._waiting:
            copy = self._waiting.pop(version)
            self._probes = {each: probe for each, probe in self._probes.items() if each >= version}
            self._last = (version, copy) if self._keeps_last else None
            return copy
        if self._last is not None and self._last[0] == version:
            return self._last[1]
        raise LearnerError(f"The learner has no snapshot of {version}: call snapshot after the step that makes it.")
