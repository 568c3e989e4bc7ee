"""The swap modes: what each does with requests while new weights arrive. One table, which service and engine read.

`keep_kv` is the in-flight weight update of PipelineRL (Piché et al., 2025, arXiv 2509.19128); `abort_resume` is the
interruptible generation of AReaL (Fu et al., 2025, arXiv 2505.24298).
"""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.errors import ConfigError

KEEP, REBUILD, RESUME, RETRY = "keep", "rebuild", "resume", "retry"


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapMode:
    """One mode."""

    name: str
    admits_while_pulling: bool = True
    """Whether requests that come during the pull enter the engine."""
    steps_while_pulling: bool = True
    """Whether the engine goes on during the pull."""
    in_flight: str = KEEP
    """What a request in flight keeps at the swap. `keep`: tokens and KV, so that its next token reads what the old
    weights remembered. `rebuild`: its tokens; their KV is computed again. `resume`: it is aborted and submitted again
    with prompt and tokens, which come back stitched. `retry`: nothing; it starts again from the prompt."""

    @property
    def holds(self) -> bool:
        """Whether generation comes to a stop before the swap, which begins when the pull begins."""
        return not (self.admits_while_pulling and self.steps_while_pulling)

    @property
    def drains(self) -> bool:
        """Whether requests in flight end with the version that they began with."""
        return self.steps_while_pulling and not self.admits_while_pulling


MODES = {
    mode.name: mode
    for mode in (
        SwapMode(name="keep_kv"),
        SwapMode(name="recompute_kv", in_flight=REBUILD),
        SwapMode(name="abort_resume", in_flight=RESUME),
        SwapMode(name="abort_retry", in_flight=RETRY),
        SwapMode(name="drain", admits_while_pulling=False),
        SwapMode(name="blocking", admits_while_pulling=False, steps_while_pulling=False, in_flight=REBUILD),
    )
}


def swap_mode(name: str) -> SwapMode:
    """The mode of that name. Raises ConfigError for a word that is none."""
    if name not in MODES:
        raise ConfigError(f"async.swap={name} is not one of {', '.join(MODES)}.")
    return MODES[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRecord:
    """What one swap cost."""

    mode: str
    pause_s: float
    """Seconds in which the engine made no token because of the swap: from the stop to the first chance of a step."""
    num_in_flight: int
    """Sequences that were in the engine, running or waiting there."""
    discarded_tokens: int
    """Sampled tokens that were thrown away."""
    recomputed_tokens: int
    """Tokens, prompts included, whose KV was dropped and is computed again; blocks that rows share count for each."""
