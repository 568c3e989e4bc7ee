"""An alarm for the day when the engine and the learner no longer compute the same model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from forge_async.observe import names

FLOAT32_NATS = 1e-3
"""Two float32 implementations differ by 2e-6 (tiny model) to 5e-5 (SmolLM2) in a log-probability; a fault of the kinds
named below makes 0.01 and more."""
ROUNDED_NATS = 0.2
"""bfloat16 has 8 bits: logits from 16 to 32 stand 0.125 apart, so that a rounding or two the other way is no fault."""


def default_limit(*dtypes: str, is_quantized: bool = False) -> float:
    """The limit that `run.parity_alarm=auto` means.

    Args:
        dtypes: in which the engine and the learner compute.
        is_quantized: whether the engine is: single tokens then differ by whole nats, and a probe is compared instead.
    """
    if is_quantized:
        return math.inf
    return FLOAT32_NATS if all(dtype == "float32" for dtype in dtypes) else ROUNDED_NATS


class ParityAlarm:
    """Looks at every metrics row, and warns once."""

    def __init__(self, limit: float, warn: Callable[[str], None]) -> None:
        """`limit` is the largest difference of a token's log-probability that is not told, in nats."""
        self._limit, self._warn, self._told = limit, warn, False

    def look(self, row: Mapping[str, float]) -> None:
        """Warn, unless that was done before, when a row's figure is above the limit or not a number."""
        found = row.get(names.MISMATCH_FRESH_MAX)
        if self._told or found is None or found <= self._limit:
            return
        self._told = True
        self._warn(
            f"step {row[names.STEP]}: {names.MISMATCH_FRESH_MAX}={found:.3g} is above run.parity_alarm="
            f"{self._limit:g}: engine and learner differ on tokens of the version that both hold. Likely causes: other "
            "dtypes (policy.dtype, learner.dtype), weights changed on their way, sampling that the learner does not "
            "know of, or a model that one of them computes otherwise; `python -m forge_async.apps.doctor parity` "
            "compares both with transformers."
        )
