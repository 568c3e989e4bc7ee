"""What travels: prompts, samples in columns, groups. Compact arrays, so that a batch is a few buffers, not objects.

Samples are stored by column over one flat token axis (sequences laid end to end, with their lengths), because a
record crosses three processes and pickling a few large arrays is many times cheaper than thousands of small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from forge_async.core import kept_sets
from forge_async.core.compact import Compact
from forge_async.core.errors import ForgeError
from forge_async.core.versions import VersionRuns

_NO_STEP = np.int32(np.iinfo(np.int32).max)

OPTIONAL_COLUMNS = ("kept_set", "routed_experts", "reference_logprobs", "teacher_logprobs")
"""The fields of Samples that are arrays of T tokens, or None; the kept set first."""

SCHEMA = 1
"""Number of this record layout; written with every stored group so that a reader can refuse what it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PromptId(Compact):
    """Where a prompt came from. No id is trained twice or skipped (Law 7)."""

    source: str
    """Name of the prompt source."""
    epoch: int
    """Pass over the source, from 0."""
    index: int
    """Position inside the source, from 0."""

    def __str__(self) -> str:
        return f"{self.source}:{self.epoch}:{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task for the policy, already rendered to tokens."""

    id: PromptId
    token_ids: np.ndarray
    """int32 [T], what the engine is given; never re-tokenised later (Law 8)."""
    text: str
    """The same for people."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """What the reward function needs besides the text, such as the reference answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions(Compact):
    """What an engine answered to one request for n samples, by column."""

    lengths: np.ndarray
    """int32 [n], tokens of each completion."""
    token_ids: np.ndarray
    """int32 [sum of lengths]."""
    logprobs: np.ndarray
    """float32 [sum of lengths], the sampler's log-probability of each token, after temperature."""
    versions: VersionRuns
    """Version of each token of the flat axis, stamped by the engine at the step that made it."""
    truncated: np.ndarray
    """bool [n], true where the token limit ended the completion rather than a stop token."""
    cut: np.ndarray
    """bool [n], true where the completion was ended from outside, before a stop token or the token limit."""
    kept_set: np.ndarray | None = None
    """int32 [sum of lengths, K], the ids that each token was sampled from, -1 padded, where top-p or top-k left some
    out; None: the whole vocabulary. `logprobs` are renormalised over them. A row without an id: too many to record."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [n * prompt tokens + sum of lengths, layers, experts a token]: the experts that the tokens of each
    completion took (`core/routing.py`), those of its prompt before them, completion after completion."""

    def bounds(self) -> np.ndarray:
        """int64 [n + 1], where each completion starts on the flat axis, and the end."""
        return bounds(self.lengths)

    def rows(self) -> list[np.ndarray]:
        """The token ids of each completion, n times int32 [T]."""
        return np.split(self.token_ids, self.bounds()[1:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Compact):
    """Trainable token sequences, by column over one flat token axis of T tokens and N samples."""

    lengths: np.ndarray
    """int32 [N], tokens of each sample, prompt included."""
    token_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T], true for the tokens that the policy made and is trained on."""
    logprobs: np.ndarray
    """float32 [T], the sampler's log-probabilities; 0 where loss_mask is false."""
    advantages: np.ndarray
    """float32 [T], 0 where loss_mask is false."""
    versions: VersionRuns
    """Version of each of the T tokens; NOT_SAMPLED where no policy made it."""
    kept_set: np.ndarray | None = None
    """Optional: the sampler's kept token ids (top-p, top-k), int32 [T, K], -1 padded. Where loss_mask is true there is
    at least one: `logprobs` are renormalised over them, and so the learner's must be."""
    routed_experts: np.ndarray | None = None
    """Optional: experts chosen while sampling, uint8 or int16 [T, layers, experts a token] (`core/routing.py`)."""
    reference_logprobs: np.ndarray | None = None
    """Optional: float32 [T], those of the reference model where a service gave them; 0 where loss_mask is false."""
    teacher_logprobs: np.ndarray | None = None
    """Optional: the same of the teacher."""
    schema: int = SCHEMA

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens, prompts included."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(self.loss_mask.sum())

    def optional_columns(self) -> dict[str, Any]:
        """Those of the columns that are optional and there, by name; T entries each."""
        return {name: column for name in OPTIONAL_COLUMNS if (column := getattr(self, name)) is not None}

    def bounds(self) -> np.ndarray:
        """int64 [N + 1], where each sample starts on the flat axis, and the end."""
        return bounds(self.lengths)

    def oldest_steps(self) -> np.ndarray:
        """int32 [N], the step of each sample's oldest sampled token; the largest int32 where nothing was sampled."""
        return oldest_steps([self])[0]

    def select(self, rows: Sequence[int] | np.ndarray) -> Samples:
        """The samples of `rows`, in that order."""
        chosen = np.asarray(rows, dtype=np.int64)
        if np.array_equal(chosen, np.arange(len(self))):
            return self
        lengths, starts = self.lengths[chosen].astype(np.int64), self.bounds()[chosen]
        # Token i of the result lies as far behind its sample's start as it does here.
        take = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(lengths.sum())
        return Samples(
            lengths=self.lengths[chosen],
            token_ids=self.token_ids[take],
            loss_mask=self.loss_mask[take],
            logprobs=self.logprobs[take],
            advantages=self.advantages[take],
            versions=self.versions.take(take),
            **{name: column[take] for name, column in self.optional_columns().items()},
        )

    @classmethod
    def concat(cls, parts: Sequence[Samples]) -> Samples:
        """Lay batches of samples end to end. Optional columns must be present in all parts or in none."""
        if not parts:
            raise ForgeError("Samples.concat needs at least one part.")
        return cls(
            lengths=np.concatenate([part.lengths for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            loss_mask=np.concatenate([part.loss_mask for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            advantages=np.concatenate([part.advantages for part in parts]),
            versions=VersionRuns.concat([part.versions for part in parts]),
            kept_set=kept_sets.lay_together([part.kept_set for part in parts], [part.num_tokens for part in parts]),
            **_concat_optional(parts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Compact):
    """The G rollouts of one prompt, scored and ready to be trained on."""

    index: int
    """Admission index, from 0 in the order of admission; the group's identity inside a run."""
    prompt_id: PromptId
    samples: Samples
    rewards: np.ndarray
    """float32 [G], one for each rollout, before normalisation."""
    policy: str = "policy"
    """Which policy's versions `samples.versions` speaks of."""

    def oldest_step(self) -> int:
        """The step of the oldest token of the group: what its staleness is measured from (Law 2)."""
        return int(self.samples.oldest_steps().min())


def oldest_steps(parts: Sequence[Samples]) -> list[np.ndarray]:
    """`Samples.oldest_steps` of each part, worked out of all together: it takes no longer for many than for one."""
    edges = list(accumulate((len(part) for part in parts), initial=0))
    if not edges[-1]:
        return [np.zeros(0, np.int32) for _ in parts]
    lengths = np.concatenate([part.lengths for part in parts])
    steps = np.concatenate([part.versions.steps for part in parts])
    per_token = np.repeat(np.where(steps < 0, _NO_STEP, steps), np.concatenate([p.versions.lengths for p in parts]))
    oldest = np.minimum.reduceat(per_token, np.cumsum(lengths) - lengths)
    return [oldest[start:stop] for start, stop in pairwise(edges)]


def bounds(lengths: np.ndarray) -> np.ndarray:
    """int64 [N + 1], the start of each of N rows laid end to end, and the end of the last."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def _concat_optional(parts: Sequence[Samples]) -> dict[str, Any]:
    """The optional columns but for the kept set, whose rows differ in width."""
    found = {}
    for name in OPTIONAL_COLUMNS[1:]:
        present = [column for part in parts if (column := getattr(part, name)) is not None]
        if present and len(present) != len(parts):
            raise ForgeError(f"Samples with and without {name} cannot be laid together: record it for all or for none.")
        if present:
            found[name] = np.concatenate(present)
    return found
