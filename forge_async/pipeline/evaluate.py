"""Evaluation on held-out prompts: each is answered greedily, and on demand by samples for pass@k."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge_async.core.records import Completions, Prompt
from forge_async.core.rng import derive_seed, request_seed
from forge_async.pipeline.collecting import new_ticket
from forge_async.pipeline.estimates import estimate, pass_at_k
from forge_async.pipeline.ports import EvalScores, PassAtK, PolicyClient
from forge_async.pipeline.settings import EvalSettings
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.prompt.ports import Renderer
from forge_async.reward.ports import RewardCall, RewardPool

SOLVED = 1.0
"""A score of this or more counts as solved."""
COLLECT_TIMEOUT_S = 3600.0
"""Longest wait for the next answer; whoever asked for the evaluation has a deadline of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Answers, scores and sums up; the same prompts and seeds each time, so that evaluations can be compared."""

    renderer: Renderer
    scorer: RewardPool
    sampling: Sampling
    """The run's: its temperature draws the samples of pass@k; the greedy answers have its other fields."""
    settings: EvalSettings
    seed: int
    """The run's."""

    async def evaluate(self, prompts: Sequence[Prompt], policy: PolicyClient, name: str) -> EvalScores:
        """Evaluate `prompts`, at least one; `name` makes the request ids of this evaluation unlike any other's.

        Greedy and sampled requests enter the engine together. Raises RewardError when a score fails.
        """
        requests = [self._greedy(prompt, f"{name}/{i}") for i, prompt in enumerate(prompts)]
        asked = [*prompts, *prompts] if self.settings.ks else prompts
        if self.settings.ks:
            requests += [self._samples(prompt, i, f"{name}/{i}/samples") for i, prompt in enumerate(prompts)]
        answers = await _answers(policy, requests)
        scores = await self._score(asked, [answers[request.id] for request in requests])
        steps = {int(step) for completions in answers.values() for step in completions.versions.steps}
        greedy, sampled = scores[: len(prompts)], scores[len(prompts) :]
        return EvalScores(
            num_prompts=len(prompts),
            greedy=estimate([float(row[0]) for row in greedy], self.seed),
            num_samples=self.settings.samples if sampled else 0,
            sampled=estimate([float(row.mean()) for row in sampled], self.seed) if sampled else None,
            pass_at=tuple(self._pass_at(sampled, k) for k in self.settings.ks),
            oldest_version=min(steps),
            newest_version=max(steps),
        )

    def _greedy(self, prompt: Prompt, id: str) -> GenerationRequest:
        sampling = dataclasses.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        return GenerationRequest(id=id, prompt_token_ids=prompt.token_ids, num_samples=1, seed=0, sampling=sampling)

    def _samples(self, prompt: Prompt, number: int, id: str) -> GenerationRequest:
        return GenerationRequest(
            id=id,
            prompt_token_ids=prompt.token_ids,
            num_samples=self.settings.samples,
            seed=request_seed(derive_seed(self.seed, "evaluation"), number, 0),
            sampling=dataclasses.replace(self.sampling, gives_kept_sets=False),
        )

    async def _score(self, prompts: Sequence[Prompt], answers: Sequence[Completions]) -> list[np.ndarray]:
        """float64 [n] of each answer's n completions."""
        pairs = list(zip(prompts, answers, strict=True))
        calls = [call for prompt, completions in pairs for call in self._calls(prompt, completions)]
        outcomes = await self.scorer.score(calls)
        scores = np.array([outcome.require() for outcome in outcomes], dtype=np.float64)
        return np.split(scores, np.cumsum([len(completions.lengths) for _, completions in pairs])[:-1])

    def _calls(self, prompt: Prompt, completions: Completions) -> list[RewardCall]:
        stop, edges = set(self.sampling.stop_token_ids), completions.bounds()
        rows = [completions.token_ids[a:b].tolist() for a, b in zip(edges[:-1], edges[1:], strict=True)]
        return [
            RewardCall(
                prompt=prompt.text,
                completion=self.renderer.decode([token for token in row if token not in stop]),
                data=prompt.data,
                truncated=bool(truncated),
            )
            for row, truncated in zip(rows, completions.truncated, strict=True)
        ]

    def _pass_at(self, sampled: Sequence[np.ndarray], k: int) -> PassAtK:
        passes = [pass_at_k(len(row), int((row >= SOLVED).sum()), k) for row in sampled]
        return PassAtK(k=k, estimate=estimate(passes, self.seed))


async def _answers(policy: PolicyClient, requests: Sequence[GenerationRequest]) -> dict[str, Completions]:
    ticket = new_ticket()
    results, done = await policy.submit(ticket, requests, COLLECT_TIMEOUT_S)
    while not done:
        more, done = await policy.collect(ticket, COLLECT_TIMEOUT_S)
        results += more
    return {result.id: result.completions for result in results}
