"""Kept sets: of each token, the ids that the sampler chose it from, int32 [T, K], likeliest first, -1 padded.

A row without an id belongs to a token that nothing was sampled for, or whose set was too large to be recorded: such a
token is not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_async.core.errors import ForgeError

NONE = np.int32(-1)
"""What fills a row behind its last id."""


def from_logprobs(token_ids: np.ndarray, logprobs: np.ndarray, *, is_whole: bool) -> np.ndarray:
    """Read kept sets off the likeliest tokens of a sampler, which gives what it left out a log-probability of -inf.

    Args:
        token_ids: int [T, C], the C likeliest tokens of each place, likeliest first.
        logprobs: float [T, C], theirs.
        is_whole: whether C is the vocabulary. Otherwise a place whose last token was kept may have kept more of them.

    Returns int32 [T, K], as narrow as the largest set allows; sets that may have more than C tokens are left empty.
    """
    kept = np.isfinite(logprobs)
    if not is_whole:
        kept &= ~kept[:, -1:]
    width = max(int(kept.sum(1).max(initial=1)), 1)
    return np.where(kept, token_ids, NONE)[:, :width].astype(np.int32)


def is_known(kept_set: np.ndarray) -> np.ndarray:
    """bool [T], whether a token's set was recorded."""
    return kept_set[:, 0] >= 0


def lay_together(parts: Sequence[np.ndarray | None], num_tokens: Sequence[int]) -> np.ndarray | None:
    """Lay kept sets end to end, all as wide as the widest; None when no part has them.

    Args:
        parts: int32 [T, K] each, of its own width. What has no token needs none.
        num_tokens: T of each part.
    """
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if any(part is None and num for part, num in zip(parts, num_tokens, strict=True)):
        raise ForgeError("Tokens with and without kept_set cannot be laid together: record it for all or for none.")
    width = max(part.shape[1] for part in present)
    return np.concatenate([_widened(part, width) for part in present])


def _widened(kept_set: np.ndarray, width: int) -> np.ndarray:
    missing = width - kept_set.shape[1]
    return np.pad(kept_set, ((0, 0), (0, missing)), constant_values=NONE) if missing else kept_set
