"""From the turns of a group to trainable samples. Token ids pass through untouched (Law 8)."""

from __future__ import annotations

import numpy as np

from forge_async.core import kept_sets
from forge_async.core.records import Completions, Samples, bounds


def samples_of_turn(prompt_token_ids: np.ndarray, completions: Completions, advantages: np.ndarray) -> Samples:
    """Join a prompt with each of its completions: rollouts of a single turn, one sample each.

    Args:
        prompt_token_ids: int32 [T], as the engine was given them.
        completions: n completions of the prompt.
        advantages: float32 [n], one for each rollout; every token of its completion carries it.
    """
    num_prompt, lengths = len(prompt_token_ids), completions.lengths.astype(np.int32)
    total_lengths = lengths + np.int32(num_prompt)
    starts = bounds(total_lengths)[:-1]
    is_prompt = np.zeros(int(total_lengths.sum()), dtype=bool)
    is_prompt[(starts[:, None] + np.arange(num_prompt)).reshape(-1)] = True
    sampled = ~is_prompt
    token_ids = np.empty(len(is_prompt), dtype=np.int32)
    token_ids[is_prompt] = np.tile(prompt_token_ids, len(lengths))
    token_ids[sampled] = completions.token_ids
    logprobs, per_token = np.zeros(len(is_prompt), np.float32), np.zeros(len(is_prompt), np.float32)
    logprobs[sampled] = completions.logprobs
    per_token[sampled] = np.repeat(advantages.astype(np.float32), lengths)
    kept_set, trained = None, sampled
    if completions.kept_set is not None:
        kept_set = np.full((len(is_prompt), completions.kept_set.shape[1]), kept_sets.NONE)
        kept_set[sampled] = completions.kept_set
        trained = kept_sets.is_known(kept_set)
        logprobs[~trained], per_token[~trained] = 0, 0
    return Samples(
        lengths=total_lengths,
        token_ids=token_ids,
        loss_mask=trained,
        logprobs=logprobs,
        advantages=per_token,
        versions=completions.versions.behind_prompts(completions.bounds(), num_prompt),
        kept_set=kept_set,
        routed_experts=completions.routed_experts,
    )
