"""From an admitted prompt to a scored group: prompt source, policy, reward, advantage, filter, samples.

This is the upper half of the ring, run inside a rollout worker. Groups leave it as they are done, many in one message.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forge_async.core.clock import within
from forge_async.core.records import Completions, Group, Prompt
from forge_async.core.rng import request_seed
from forge_async.pipeline.ports import Admission, PolicyClient
from forge_async.policy.ports import GenerationRequest, GenerationResult, Sampling
from forge_async.prompt.ports import PromptSource, Renderer
from forge_async.reward.advantages import is_zero_variance, rollout_advantages, shaped_rewards
from forge_async.reward.ports import RewardCall, RewardPool
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.samples import samples_of_turn
from forge_async.rollout.settings import RolloutSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeGroup:
    """A group as the worker made it, with what the run's records want to know."""

    group: Group
    attempt: int
    filtered: str
    """Why it must not be trained on, or ""."""
    generated_s: float
    """Wall clock when its last token was there."""
    scored_s: float
    """Wall clock when its rewards were there."""
    num_tokens: int
    """Tokens that the policy made for it."""
    prompt_text: str
    completions: tuple[str, ...]
    """Decoded, for people."""


@dataclass(slots=True, kw_only=True)
class WorkerStats:
    """Seconds that a worker spent since it was last asked."""

    score_s: float = 0.0
    groups: int = 0
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(name, category, start, duration), wall clock, for the trace."""


class GroupMaker:
    """Makes groups with one prompt source, renderer and reward pool, from any policy replica."""

    def __init__(
        self,
        *,
        source: PromptSource,
        renderer: Renderer,
        rewards: RewardPool,
        sampling: Sampling,
        group_size: int,
        run_seed: int,
        advantage: AdvantageSettings,
        rollout: RolloutSettings,
    ) -> None:
        self._source, self._renderer, self._rewards = source, renderer, rewards
        self._sampling, self._group_size, self._run_seed = sampling, group_size, run_seed
        self._advantage, self._rollout = advantage, rollout
        self._stats = WorkerStats()

    async def make(self, admissions: Sequence[Admission], policy: PolicyClient) -> AsyncIterator[list[MadeGroup]]:
        """Yield the groups of `admissions` as they are done, in batches of those that finished together.

        All requests enter the engine together, in order of admission. Raises StallError when the policy gives nothing
        for `rollout.group_timeout_s` seconds, RewardError when the reward function fails.
        """
        prompts = {str(admission.index): self._source.prompt(admission.prompt_id) for admission in admissions}
        by_id = {str(admission.index): admission for admission in admissions}
        requests = [
            self._request(id, prompts[id], request_seed(self._run_seed, admission.index, 0))
            for id, admission in by_id.items()
        ]
        ticket, done = await policy.submit(requests), False
        while not done:
            results, done = await within(
                policy.collect(ticket, self._rollout.linger_s),
                self._rollout.group_timeout_s,
                who="The rollout worker",
                waits_for=f"the completions of groups {admissions[0].index}..{admissions[-1].index}",
                from_whom="the policy",
            )
            yield await self._score([(by_id[result.id], prompts[result.id], result) for result in results])

    def take_stats(self) -> WorkerStats:
        """Statistics since the last call."""
        stats, self._stats = self._stats, WorkerStats()
        return stats

    def _request(self, request_id: str, prompt: Prompt, seed: int) -> GenerationRequest:
        return GenerationRequest(
            id=request_id,
            prompt_token_ids=prompt.token_ids,
            num_samples=self._group_size,
            seed=seed,
            sampling=self._sampling,
        )

    async def _score(self, finished: list[tuple[Admission, Prompt, GenerationResult]]) -> list[MadeGroup]:
        generated_s = time.time()
        texts = [self._decode(result.completions) for _, _, result in finished]
        calls = [
            RewardCall(prompt=prompt.text, completion=text, data=prompt.data, truncated=bool(truncated))
            for (_, prompt, result), group_texts in zip(finished, texts, strict=True)
            for text, truncated in zip(group_texts, result.completions.truncated, strict=True)
        ]
        outcomes = await self._rewards.score(calls)
        rewards = np.array([outcome.require() for outcome in outcomes], dtype=np.float32)
        scored_s = time.time()
        self._stats.score_s += scored_s - generated_s
        self._stats.groups += len(finished)
        self._stats.spans.append(("score", "work", generated_s, scored_s - generated_s))
        rows = np.split(rewards, np.cumsum([len(group_texts) for group_texts in texts])[:-1])
        return [
            self._group(admission, prompt, result.completions, row, group_texts, generated_s, scored_s)
            for (admission, prompt, result), row, group_texts in zip(finished, rows, texts, strict=True)
        ]

    def _decode(self, completions: Completions) -> tuple[str, ...]:
        stop, edges = set(self._sampling.stop_token_ids), completions.bounds()
        rows = (completions.token_ids[a:b].tolist() for a, b in zip(edges[:-1], edges[1:], strict=True))
        return tuple(self._renderer.decode([token for token in row if token not in stop]) for row in rows)

    def _group(
        self,
        admission: Admission,
        prompt: Prompt,
        completions: Completions,
        rewards: np.ndarray,
        texts: tuple[str, ...],
        generated_s: float,
        scored_s: float,
    ) -> MadeGroup:
        shaped = shaped_rewards(rewards, completions.lengths, self._sampling.max_new_tokens, self._advantage)
        drop = self._advantage.zero_variance == "refill" and is_zero_variance(shaped)
        advantages = rollout_advantages(shaped, completions.truncated, self._advantage)
        return MadeGroup(
            group=Group(
                index=admission.index,
                prompt_id=admission.prompt_id,
                samples=samples_of_turn(prompt.token_ids, completions, advantages),
                rewards=rewards,
            ),
            attempt=admission.attempt,
            filtered="zero_variance" if drop else "",
            generated_s=generated_s,
            scored_s=scored_s,
            num_tokens=len(completions.token_ids),
            prompt_text=prompt.text,
            completions=texts,
        )
