"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from forge_async.core.records import Prompt
from forge_async.pipeline.ports import PolicyClient
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.prompt.ports import Renderer
from forge_async.reward.ports import RewardCall, RewardPool


async def evaluate(
    prompts: Sequence[Prompt],
    policy: PolicyClient,
    *,
    renderer: Renderer,
    scorer: RewardPool,
    sampling: Sampling,
    name: str,
) -> tuple[float, set[int]]:
    """Answer each prompt once, greedily, and score the answers.

    Args:
        name: makes the request ids of this evaluation unlike any other's.

    Returns the mean score and the steps of the versions that made the answers.
    """
    greedy = dataclasses.replace(sampling, temperature=0.0)
    requests = [
        GenerationRequest(id=f"{name}/{i}", prompt_token_ids=prompt.token_ids, num_samples=1, seed=0, sampling=greedy)
        for i, prompt in enumerate(prompts)
    ]
    ticket, done, answers = await policy.submit(requests), False, {}
    while not done:
        results, done = await policy.collect(ticket, 3600.0)
        answers.update({result.id: result.completions for result in results})
    stop = set(sampling.stop_token_ids)
    calls = [
        RewardCall(
            prompt=prompt.text,
            completion=renderer.decode([t for t in answers[request.id].token_ids.tolist() if t not in stop]),
            data=prompt.data,
            truncated=bool(answers[request.id].truncated[0]),
        )
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    outcomes = await scorer.score(calls)
    steps = {int(step) for completions in answers.values() for step in completions.versions.steps}
    return sum(outcome.require() for outcome in outcomes) / len(outcomes), steps
