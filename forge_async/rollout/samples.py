"""From the turns of a group to trainable samples. Token ids pass through untouched (Law 8)."""

from __future__ import annotations

import numpy as np

from forge_async.core import kept_sets
from forge_async.core.records import Completions, Samples


def samples_of_turn(prompt_token_ids: np.ndarray, completions: Completions, advantages: np.ndarray) -> Samples:
    """Join a prompt with each of its completions: rollouts of a single turn, one sample each.

    Args:
        prompt_token_ids: int32 [T], as the engine was given them.
        completions: n completions of the prompt.
        advantages: float32 [n], one for each rollout; every token of its completion carries it.
    """
    num_prompt, lengths = len(prompt_token_ids), completions.lengths.astype(np.int32)
    sampled = np.repeat(np.arange(2 * len(lengths)) % 2 == 1, _spans(lengths, num_prompt))
    token_ids = np.empty(len(sampled), dtype=np.int32)
    token_ids[~sampled] = np.broadcast_to(prompt_token_ids, (len(lengths), num_prompt)).reshape(-1)
    token_ids[sampled] = completions.token_ids
    logprobs, per_token = np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.float32)
    logprobs[sampled] = completions.logprobs
    per_token[sampled] = np.repeat(advantages.astype(np.float32), lengths)
    kept_set, trained = None, sampled
    if completions.kept_set is not None:
        kept_set = np.full((len(sampled), completions.kept_set.shape[1]), kept_sets.NONE)
        kept_set[sampled] = completions.kept_set
        trained = kept_sets.is_known(kept_set)
        logprobs[~trained], per_token[~trained] = 0, 0
    return Samples(
        lengths=lengths + np.int32(num_prompt),
        token_ids=token_ids,
        loss_mask=trained,
        logprobs=logprobs,
        advantages=per_token,
        versions=completions.versions.behind_prompts(lengths, num_prompt),
        kept_set=kept_set,
        routed_experts=completions.routed_experts,
    )


def _spans(lengths: np.ndarray, num_prompt: int) -> np.ndarray:
    """int [2 n], tokens of a prompt and of its completion in turn."""
    spans = np.full(2 * len(lengths), num_prompt)
    spans[1::2] = lengths
    return spans
