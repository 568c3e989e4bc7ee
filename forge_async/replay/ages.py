"""How old the samples of a batch are, in versions, and where they grew old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.errors import StalenessError
from forge_async.core.records import Group

NO_TOKENS = np.iinfo(np.int32).max
"""What `Samples.oldest_steps` says of a sample without a sampled token; such a sample has no age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Staleness over the samples of one batch, in steps. `in_flight` + `in_queue` = `staleness` for every sample."""

    staleness: np.ndarray
    """int32 [N], consuming step minus the step of the sample's oldest token."""
    in_flight: np.ndarray
    """int32 [N], learner version when the group became ready minus the step of the sample's oldest token."""
    in_queue: np.ndarray
    """int32 [N], consuming step minus the learner version when the group became ready."""

    def metrics(self) -> dict[str, float]:
        """The figures for `metrics.jsonl`; zeros for an empty batch."""
        if not len(self.staleness):
            return dict.fromkeys(_NAMES, 0.0)
        return dict(
            zip(
                _NAMES,
                (
                    float(self.staleness.max()),
                    float(self.staleness.mean()),
                    float(np.percentile(self.staleness, 90)),
                    float(self.in_flight.mean()),
                    float(self.in_queue.mean()),
                ),
                strict=True,
            )
        )


_NAMES = (
    "staleness/max",
    "staleness/mean",
    "staleness/p90",
    "staleness/in_flight_mean",
    "staleness/in_queue_mean",
)


def ages(oldest_steps: Sequence[np.ndarray], step: int, ready_at_steps: Sequence[int]) -> Ages:
    """Ages of the samples of a batch when step `step` consumes it.

    Args:
        oldest_steps: for each group, int32 [N] as `Samples.oldest_steps` gives them.
        step: the consuming step, which is the learner's version before its update.
        ready_at_steps: for each group, the learner's version when it became ready.
    """
    ready_at = np.repeat(np.asarray(ready_at_steps, dtype=np.int32), [len(steps) for steps in oldest_steps])
    flat = np.concatenate([*oldest_steps, np.zeros(0, dtype=np.int32)]).astype(np.int32)
    aged = flat != NO_TOKENS
    flat, ready_at = flat[aged], ready_at[aged]
    return Ages(staleness=step - flat, in_flight=ready_at - flat, in_queue=step - ready_at)


def check_age(group: Group, step: int, max_staleness: int) -> None:
    """Raise StalenessError naming group, age and its bound if step `step` may not consume it (Law 2)."""
    age = step - group.oldest_step()
    if age > max_staleness:
        raise StalenessError(
            f"Group {group.index} is too old for step {step}: its oldest token is of version "
            f"{group.oldest_step()}, {age} steps before, and its bound is max_staleness={max_staleness}; "
            "async.on_stale=wait makes such groups anew, drop leaves them out."
        )
