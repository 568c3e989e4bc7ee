"""The seam between rollouts and whatever turns a completion into a number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from forge_async.core.errors import RewardError

FaultKind = Literal["raised", "hung", "not_a_number", "missing_data", "died"]
"""What can go wrong with one call: the function raised; did not answer in time; returned something that is not a
finite number; needs a field that the prompt's data lacks; or took its worker process down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardCall:
    """One completion to be scored."""

    prompt: str
    """The prompt's text, as people read it."""
    completion: str
    """What the policy answered, decoded, without stop tokens."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's data (reference answer and so on); becomes the function's keyword arguments."""
    truncated: bool = False
    """True where the token limit ended the completion rather than a stop token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFault:
    """Why a call has no number."""

    kind: FaultKind
    message: str
    """Names the function, the prompt and the cause; for `raised` the last lines of the user's traceback follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """What came of one call: a value or an error, never both."""

    value: float | None = None
    """The reward, finite; None where there is an error."""
    error: RewardFault | None = None
    elapsed_s: float = 0.0
    """Seconds that the function took, measured beside it."""

    def require(self) -> float:
        """Return the value. Raises RewardError with the fault's message where there is none."""
        if self.value is None:
            raise RewardError(self.error.message if self.error else "A reward call ended with neither value nor error.")
        return self.value


class RewardPool(Protocol):
    """Scores completions without letting a bad function harm the caller."""

    async def start(self) -> None:
        """Make ready. Raises ConfigError when the function cannot be loaded."""
        ...

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        """Return one outcome for each call, in order. Faults of the function are outcomes, not exceptions."""
        ...

    async def close(self) -> None:
        """End every process of the pool; may be called twice."""
        ...
