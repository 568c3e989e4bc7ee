"""Routed experts: of each token and each layer that has experts, the numbers of those that it took.

uint8 or int16 [T, layers with experts, experts a token]. A row of the largest number of the dtype stands for a token
whose choice was not recorded: the last one of a completion, which the engine never read, or one that an engine lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forge_async.core.errors import ForgeError


def dtype_for(num_experts: int) -> type[np.integer]:
    """The narrowest dtype for so many experts, with a number to spare."""
    return np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.int16


def unknown(num_tokens: int, like: np.ndarray) -> np.ndarray:
    """Rows of tokens whose choice is not known.

    Args:
        num_tokens: of them.
        like: its dtype, layers and experts a token.
    """
    return np.full((num_tokens, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def is_known(routed_experts: np.ndarray) -> np.ndarray:
    """bool [T], whether a token's choice was recorded."""
    return routed_experts[:, 0, 0] != np.iinfo(routed_experts.dtype).max


def lay_together(parts: Sequence[np.ndarray | None], num_tokens: Sequence[int]) -> np.ndarray | None:
    """Lay records end to end; a part that has none counts as unknown. None when no part has any.

    Args:
        parts: [T, layers, experts a token] each.
        num_tokens: T of each part.
    """
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    return np.concatenate(
        [unknown(count, like) if part is None else part for part, count in zip(parts, num_tokens, strict=True)]
    )


def later(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
    """The record of tokens that were computed twice: the newer one, the older one where that is unknown.

    Args:
        old: of the first tokens of `new`, or of all.
        new: of all.
    """
    if old is None or new is None:
        return old if new is None else new
    if len(old) > len(new):
        raise ForgeError(f"{len(old)} tokens were routed before, and only {len(new)} now.")
    first = np.where(is_known(new[: len(old)])[:, None, None], new[: len(old)], old)
    return np.concatenate([first, new[len(old) :]])
