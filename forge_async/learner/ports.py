"""What the pipeline asks of a learner rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimiser step did, equal on every rank."""

    version: PolicyVersion
    """The version that the step produced."""
    loss: float
    """Of the whole batch: the weighted sum of its components, each over its own denominator."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_loss_tokens: int
    """Tokens trained on, all ranks."""
    num_row_tokens: int
    """Tokens computed, padding included, all ranks."""
    num_sample_tokens: int
    """Those of them that are of samples, all ranks; a prompt that samples of a row share counts once."""
    clip_fraction: float
    """Share of tokens whose ratio lies outside the clip range."""
    mismatch_kl: float
    """Mean k3 estimate of KL(sampler || current policy at the step's start), a token."""
    logprob_diff_max: float
    """Largest |current - sampler| log-probability of a token."""
    compute_s: float
    """Seconds of forward, backward and optimiser on this rank."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else the objective and the correction measured, by its name in the metrics row."""


class Learner(Protocol):
    """One rank of a learner. Synchronous; all ranks make the same calls in the same order."""

    version: PolicyVersion

    def train(self, share: Share) -> StepResult:
        """Take one optimiser step. Raises NonFiniteError, leaving the weights as they were."""
        ...

    def snapshot(self, blob: Any = None) -> tuple[Any, Any]:
        """Copy this rank's parameters: (what they are, blob), ready to be published while the next step runs.

        `blob`: memory of `snapshot_bytes` bytes to copy into; None takes new memory.
        """
        ...

    def begin_snapshot(self, copier: Executor, blob: Any = None) -> Future[tuple[Any, Any]]:
        """As `snapshot`, with the copy made by `copier` beside what is called next; collective work is done at once.

        Whatever changes the parameters waits for the copy: `train` does so after forward and backward.
        """
        ...

    @property
    def snapshot_bytes(self) -> int:
        """Size of the last snapshot's blob; 0 before the first."""
        ...

    def score(self, token_ids: Sequence[np.ndarray], temperature: float = 0.0) -> list[np.ndarray]:
        """float32 [T - 1] for each sequence: log-probability of each token after the first. Collective.

        Args:
            temperature: that logits are divided by; 0: the sampler's.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder (weights by rank 0; collective)."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write what `restore` needs: parameters, optimiser, value head. Collective."""
        ...

    def restore(self, folder: Path, version: PolicyVersion) -> None:
        """Go on from what `save_state` wrote, as `version`; the number of ranks may differ. Collective.

        Raises LearnerError when it cannot be read or is of another model.
        """
        ...

    def digest(self) -> str:
        """sha256 over the parameters sorted by Hugging Face name: name, dtype, shape, bytes. Collective."""
        ...
