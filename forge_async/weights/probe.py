"""The probe: a fixed text whose log-probabilities under a version travel with it, for replicas to compare with theirs.

An engine that computes in another form, as a quantised one does, never gives the same numbers. So the comparison is a
coarse one, from end to end: how far the engine is off on average, and whether it moved at all when the learner did.
What can be compared exactly is compared exactly (`fingerprint.py`, `Engine.first_wrong`).
"""

from __future__ import annotations

import numpy as np

from forge_async.core.errors import FingerprintError
from forge_async.weights.manifest import Manifest, Probe

MOVED_NATS = 1e-4
"""From here on the learner's change between two versions is one that weights made, and not rounding."""


class ProbeCheck:
    """Compares what one replica's engine says, version after version."""

    def __init__(self, who: str, limit: float) -> None:
        """Args:
        who: names the replica in errors.
        limit: largest mean difference of a token's log-probability that passes, in nats.
        """
        self._who, self._limit = who, limit
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        """What learner and engine said of the version before."""

    def look(self, manifest: Manifest, served: np.ndarray) -> float:
        """Compare; returns the mean difference in nats.

        Args:
            manifest: of the version that should be served, with its probe.
            served: float32 [T - 1], the engine's log-probabilities of the probe's tokens after the first.

        Raises FingerprintError for an engine that is too far off, or that did not move.
        """
        wanted = np.asarray(probe_of(manifest, self._who).logprobs, dtype=np.float64)
        gap = float(np.abs(served - wanted).mean())
        if not gap <= self._limit:
            raise FingerprintError(
                f"{self._who} pulled {manifest.version}, and gives the tokens of its probe log-probabilities that are "
                f"{gap:.3g} nats from the learner's on average, where weights.probe_limit={self._limit:g}; it must not "
                "serve. Give a higher limit if that is what the quantised engine costs, or leave out policy.quantize."
            )
        if self._last is not None and self._last[0].shape == wanted.shape:
            moved = float(np.abs(wanted - self._last[0]).mean())
            if moved > MOVED_NATS and np.array_equal(served, self._last[1]):
                raise FingerprintError(
                    f"{self._who} pulled {manifest.version}, but computes as it did before, while the learner's probe "
                    f"moved by {moved:.3g} nats on average; it must not serve."
                )
        self._last = (wanted, np.array(served))
        return gap


def probe_of(manifest: Manifest, who: str) -> Probe:
    """The probe that came with a version. Raises FingerprintError when none did."""
    if manifest.probe is None:
        raise FingerprintError(
            f"{who} is quantised, and {manifest.version} comes without a probe to compare it by; publish it from a "
            "LearnerPlan with probe_tokens, or give weights.verify=none."
        )
    return manifest.probe
