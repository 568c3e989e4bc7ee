"""How long each simulated part takes, and how long rollouts are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forge_async.core.rng import stream
from forge_async.policy.ports import GenerationRequest

LengthsOf = Callable[[GenerationRequest], np.ndarray]
"""int32 [n], tokens of each completion of a request; the same answer for the same request, whoever asks and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTimes:
    """One policy replica."""

    full_token_s: float = 0.01
    """Seconds of an engine step with every slot in use: each running rollout gets one token."""
    fixed_share: float = 0.5
    """Share of that time which a step takes however few rollouts run, 0 to 1. Near 1: reading the weights dominates, as
    in decoding small batches, and a straggler is as slow alone as in company. Near 0: work goes with the load."""
    max_sequences: int = 64
    """Slots: rollouts that run together."""
    prefill_token_s: float = 0.0
    """Seconds to rebuild the KV of one token."""
    resubmit_s: float = 0.0
    """Seconds to abort one rollout and submit it again."""
    fetch_s: float = 0.0
    """Seconds to fetch a version."""
    swap_s: float = 0.0
    """Seconds without a token while fetched weights are put in place."""

    def token_s(self, num_running: int) -> float:
        """Seconds of an engine step with `num_running` rollouts."""
        load = num_running / self.max_sequences
        return self.full_token_s * (self.fixed_share + (1.0 - self.fixed_share) * load)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """The learner."""

    step_s: float = 0.0
    """Seconds of a step, however many tokens it has."""
    token_s: float = 0.0
    """Seconds of a step for each token of its batch, prompts included."""
    snapshot_s: float = 0.0
    """Seconds to copy out the parameters."""
    publish_s: float = 0.0
    """Seconds to put a snapshot into the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTimes:
    """What scores completions: slots, each busy with one completion at a time."""

    call_s: float = 0.0
    """Seconds that one completion takes."""
    num_slots: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLengths:
    """Long-tailed completion lengths: the logarithm is normal with standard deviation `sigma`."""

    mean_tokens: float
    """Mean, before the limit cuts."""
    sigma: float
    """0: all alike. 0.5: the longest of a thousand is 4 times the mean; 1: it is 14 times the mean."""
    seed: int = 0

    def __call__(self, request: GenerationRequest) -> np.ndarray:
        """Lengths of the completions of `request`, cut at its token limit."""
        normal = stream(self.seed, "lengths", request.id).standard_normal(request.num_samples)
        drawn = self.mean_tokens * np.exp(self.sigma * normal - self.sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, request.sampling.max_new_tokens).astype(np.int32)
