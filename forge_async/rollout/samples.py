"""From the turns of groups to trainable samples. Token ids pass through untouched (Law 8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from forge_async.core import kept_sets
from forge_async.core.records import Completions, Samples, bounds
from forge_async.core.versions import VersionRuns


def samples_of_turn(prompt_token_ids: np.ndarray, completions: Completions, advantages: np.ndarray) -> Samples:
    """Join a prompt with each of its completions: rollouts of a single turn, one sample each.

    Args:
        prompt_token_ids: int32 [T], as the engine was given them.
        completions: n completions of the prompt.
        advantages: float32 [n], one for each rollout; every token of its completion carries it.
    """
    return samples_of_turns([prompt_token_ids], [completions], [advantages])[0]


def samples_of_turns(
    prompts: Sequence[np.ndarray], completions: Sequence[Completions], advantages: Sequence[np.ndarray]
) -> list[Samples]:
    """The same for many groups, an entry of each argument for each of them.

    The columns are laid out once for all groups, and each has its part of them: numpy takes about as long over a group
    as over a hundred.
    """
    if not completions:
        return []
    sizes = [len(each.lengths) for each in completions]
    lengths = np.concatenate([each.lengths for each in completions]).astype(np.int32)
    num_prompt = np.repeat(np.array([len(prompt) for prompt in prompts], np.int32), sizes)
    spans = np.stack([num_prompt, lengths], axis=1).reshape(-1)  # of a prompt and of its completion in turn
    sampled = np.repeat(np.arange(len(spans)) % 2 == 1, spans)

    def behind_prompts(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
        column = np.zeros(len(sampled), dtype)
        column[sampled] = values
        return column

    token_ids = behind_prompts(np.concatenate([each.token_ids for each in completions]), np.int32)
    token_ids[~sampled] = np.concatenate([p for p, size in zip(prompts, sizes, strict=True) for _ in range(size)])
    laid = Samples(
        lengths=lengths + num_prompt,
        token_ids=token_ids,
        loss_mask=sampled,
        logprobs=behind_prompts(np.concatenate([each.logprobs for each in completions]), np.float32),
        advantages=behind_prompts(np.repeat(np.concatenate(advantages), lengths), np.float32),
        versions=VersionRuns.concat([each.versions for each in completions]).behind_prompts(lengths, num_prompt),
    )
    parts = zip(_apart(laid, sizes), completions, strict=True)
    return [_with_optional_columns(part, each) for part, each in parts]


def _apart(laid: Samples, sizes: Sequence[int]) -> list[Samples]:
    """So many samples in turn, as views."""
    rows = bounds(np.array(sizes))
    tokens = laid.bounds()[rows]
    runs = np.searchsorted(np.cumsum(laid.versions.lengths), tokens, side="right")  # a sample begins with a run
    places = zip(*(pairwise(edges.tolist()) for edges in (rows, tokens, runs)), strict=True)
    return [
        Samples(
            lengths=laid.lengths[row:last_row],
            token_ids=laid.token_ids[token:last_token],
            loss_mask=laid.loss_mask[token:last_token],
            logprobs=laid.logprobs[token:last_token],
            advantages=laid.advantages[token:last_token],
            versions=VersionRuns(
                lengths=laid.versions.lengths[run:last_run],
                steps=laid.versions.steps[run:last_run],
                incarnations=laid.versions.incarnations[run:last_run],
            ),
        )
        for (row, last_row), (token, last_token), (run, last_run) in places
    ]


def _with_optional_columns(samples: Samples, completions: Completions) -> Samples:
    """What the engine recorded of some completions only, laid beside their tokens."""
    if completions.routed_experts is not None:
        samples = dataclasses.replace(samples, routed_experts=completions.routed_experts)
    if completions.kept_set is None:
        return samples
    kept_set = np.full((samples.num_tokens, completions.kept_set.shape[1]), kept_sets.NONE)
    kept_set[samples.loss_mask] = completions.kept_set
    trained = kept_sets.is_known(kept_set)
    return dataclasses.replace(
        samples,
        loss_mask=trained,
        logprobs=np.where(trained, samples.logprobs, np.float32(0)),
        advantages=np.where(trained, samples.advantages, np.float32(0)),
        kept_set=kept_set,
    )
