"""What becomes of a sample that is longer than the learner takes, settled before its group is admitted to a batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimit:
    """The longest sample, and the rule for longer ones."""

    max_tokens: int = 0
    """Prompt included; 0: no limit."""
    rule: str = "refuse"
    """`refuse` the group, or `truncate` the sample."""

    def num_oversize(self, samples: Samples) -> int:
        """Samples above the limit."""
        return int((samples.lengths > self.max_tokens).sum()) if self.max_tokens else 0

    def applied(self, samples: Samples) -> Samples | None:
        """The samples within the limit, or None when the group is refused.

        Cutting leaves the advantages as they are, since rewards were given to whole rollouts. A group is refused under
        either rule when cutting would leave a sample without a token to train on.
        """
        if not self.num_oversize(samples):
            return samples
        cut = first_tokens(samples, self.max_tokens) if self.rule == "truncate" else None
        return cut if cut is not None and _all_train(cut) else None


def first_tokens(samples: Samples, max_tokens: int) -> Samples:
    """Each sample's first `max_tokens` tokens."""
    lengths = samples.lengths.astype(np.int64)
    behind_start = np.arange(samples.num_tokens) - np.repeat(samples.bounds()[:-1], lengths)
    kept = np.flatnonzero(behind_start < max_tokens)
    return dataclasses.replace(
        samples,
        lengths=np.minimum(samples.lengths, np.int32(max_tokens)),
        token_ids=samples.token_ids[kept],
        loss_mask=samples.loss_mask[kept],
        logprobs=samples.logprobs[kept],
        advantages=samples.advantages[kept],
        versions=samples.versions.take(kept),
        kept_set=None if samples.kept_set is None else samples.kept_set[kept],
        routed_experts=None if samples.routed_experts is None else samples.routed_experts[kept],
    )


def _all_train(samples: Samples) -> bool:
    return bool(np.logical_or.reduceat(samples.loss_mask, samples.bounds()[:-1]).all())
