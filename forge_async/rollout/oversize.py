"""What becomes of a sample that is longer than the learner takes, settled before its group is admitted to a batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Samples
from forge_async.core.versions import NOT_SAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimit:
    """The longest sample, and the rule for longer ones."""

    max_tokens: int = 0
    """Prompt included; 0: no limit."""
    rule: str = "refuse"
    """`refuse` the group, `truncate` the sample, or cut it behind a whole turn (`turns`)."""

    def num_oversize(self, samples: Samples) -> int:
        """Samples above the limit."""
        return int((samples.lengths > self.max_tokens).sum()) if self.max_tokens else 0

    def applied(self, samples: Samples) -> Samples | None:
        """The samples within the limit, or None when the group is refused.

        Cutting leaves the advantages as they are, since rewards were given to whole rollouts. A group is refused under
        every rule when cutting would leave a sample without a token to train on.
        """
        if not self.num_oversize(samples):
            return samples
        if self.rule == "refuse":
            return None
        first = first_turns if self.rule == "turns" else first_tokens
        cut = first(samples, self.max_tokens)
        return cut if _all_train(cut) else None


def first_tokens(samples: Samples, max_tokens: int) -> Samples:
    """Each sample's first `max_tokens` tokens."""
    return _first(samples, np.minimum(samples.lengths, max_tokens))


def first_turns(samples: Samples, max_tokens: int) -> Samples:
    """Each sample's first turns that end within `max_tokens` tokens; the others are dropped with what follows them.

    A later turn is not made a sample of its own: without all that came before it, the learner would give its tokens
    other log-probabilities than the sampler did (Law 8), and with it it is as long as it was.
    """
    lengths = samples.lengths.astype(np.int64)
    sampled, is_last = samples.versions.per_token_steps() != NOT_SAMPLED, np.zeros(samples.num_tokens, dtype=bool)
    is_last[samples.bounds()[1:] - 1] = True
    ends_turn = sampled & (is_last | ~np.append(sampled[1:], False))
    ends = np.where(ends_turn & (_places(samples) < max_tokens), _places(samples) + 1, 0)
    fitting = np.maximum.reduceat(ends, samples.bounds()[:-1])
    return _first(samples, np.where(lengths > max_tokens, fitting, lengths))


def _places(samples: Samples) -> np.ndarray:
    """int64 [T]: each token's place in its sample, from 0."""
    return np.arange(samples.num_tokens) - np.repeat(samples.bounds()[:-1], samples.lengths)


def _first(samples: Samples, lengths: np.ndarray) -> Samples:
    """So many tokens of each sample's beginning."""
    kept = np.flatnonzero(_places(samples) < np.repeat(lengths, samples.lengths))
    return dataclasses.replace(
        samples,
        lengths=lengths.astype(np.int32),
        token_ids=samples.token_ids[kept],
        loss_mask=samples.loss_mask[kept],
        logprobs=samples.logprobs[kept],
        advantages=samples.advantages[kept],
        versions=samples.versions.take(kept),
        **{name: column[kept] for name, column in samples.optional_columns().items()},
    )


def _all_train(samples: Samples) -> bool:
    if not samples.lengths.all():
        return False
    return bool(np.logical_or.reduceat(samples.loss_mask, samples.bounds()[:-1]).all())
