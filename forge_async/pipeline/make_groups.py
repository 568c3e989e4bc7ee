"""From an admitted prompt to a scored group: prompt source, policy, reward, advantage, filter, samples.

This is the upper half of the ring, run inside a rollout worker. Groups leave it as they are done, many in one message.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import numpy as np

from forge_async.core.errors import RequestRefusedError
from forge_async.core.records import Completions, Group, Prompt, Samples, bounds
from forge_async.core.rng import request_seed
from forge_async.pipeline.collecting import collected
from forge_async.pipeline.ports import Admission, PolicyClient
from forge_async.pipeline.reference_scores import Reference, with_reference_scores
from forge_async.policy.ports import GenerationRequest, GenerationResult, Sampling
from forge_async.policy.rows import completions_of, rows_of
from forge_async.prompt.ports import PromptSource, Renderer
from forge_async.reward.advantages import Judged, judged
from forge_async.reward.ports import RewardCall, RewardPool
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.oversize import SampleLimit
from forge_async.rollout.samples import samples_of_turns
from forge_async.rollout.settings import RolloutSettings

Generated = Callable[[Sequence[tuple[int, int]]], Awaitable[Any]]
"""Takes (index, attempt) of groups whose tokens are all made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeGroup:
    """A group as the worker made it, with what the run's records want to know."""

    admission: Admission
    group: Group
    outcome: str = ""
    """`filtered` when it must not be trained on, or ""."""
    reason: str = ""
    """Which filter, or ""."""
    generated_s: float
    """Wall clock when its last token was there."""
    scored_s: float
    """Wall clock when its rewards were there."""
    num_tokens: int
    """Tokens that the policy made for it."""
    prompt_text: str
    completions: tuple[str, ...]
    """Decoded, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostGroup:
    """A group that could not be made; another prompt takes its place."""

    admission: Admission
    reason: str
    """In a word or two: `rollout_timeout`, `group_timeout` or `refused`."""
    outcome: str = "failed"


@dataclass(slots=True, kw_only=True)
class WorkerStats:
    """What a worker did since it was last asked."""

    score_s: float = 0.0
    """Seconds spent scoring."""
    reference_s: float = 0.0
    """Seconds spent waiting for the reference service."""
    groups: int = 0
    """Groups scored."""
    num_cut: int = 0
    """Rollouts that were cut off at their deadline."""
    num_salvaged: int = 0
    """Groups that go on without some of their rollouts."""
    num_oversize: int = 0
    """Samples above `learner.max_sample_tokens`, cut or refused."""
    num_unknown_tokens: int = 0
    """Sampled tokens that are not trained on because their kept set was too large to be recorded."""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(name, category, start, duration), wall clock, for the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A group on its way."""

    admission: Admission
    prompt: Prompt
    completions: Completions | None = None
    """Its finished rollouts, once they are there."""

    @property
    def whole(self) -> Completions:
        """Its finished rollouts."""
        assert self.completions is not None
        return self.completions


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
        now_s: Callable[[], float] = time.time,
        limit: SampleLimit | None = None,
        reference: Reference | None = None,
    ) -> None:
        """`now_s` is the wall clock that groups are stamped with; `reference` scores what is to be trained on."""
        self._now_s = now_s
        self._source, self._renderer, self._rewards = source, renderer, rewards
        self._sampling, self._group_size, self._run_seed = sampling, group_size, run_seed
        self._advantage, self._rollout, self._limit = advantage, rollout, limit or SampleLimit()
        self._reference = reference
        self._stats = WorkerStats()

    async def make(
        self, admissions: Sequence[Admission], policy: PolicyClient, generated: Generated | None = None
    ) -> AsyncGenerator[list[MadeGroup | LostGroup], None]:
        """Yield the groups of `admissions` as they are done, in batches of those that finished together.

        All requests enter the engine together, in order of admission. A rollout that takes longer than
        `rollout.timeout_s` is cut off: its group goes on with the finished ones, whose rewards are its baseline, or is
        lost when they are too few. A group that is not scored after `rollout.group_timeout_s` is lost. Raises
        StallError when the policy does not answer any more, RewardError when the reward function fails.

        `generated` is told of groups before they are scored.
        """
        asked = {
            str(admission.index): _Asked(admission=admission, prompt=self._source.prompt(admission.prompt_id))
            for admission in admissions
        }
        deadline_s = asyncio.get_running_loop().time() + self._rollout.group_timeout_s
        results = collected(
            policy,
            [self._request(id, each) for id, each in asked.items()],
            linger_s=self._rollout.linger_s,
            timeout_s=min(self._rollout.timeout_s, self._rollout.group_timeout_s),
        )
        try:
            async with aclosing(results) as batches:
                async for batch in batches:
                    finished = [(asked.pop(result.id), result) for result in batch]
                    if generated is not None:
                        await generated([(each.admission.index, each.admission.attempt) for each, _ in finished])
                    yield await self._finish(finished, deadline_s)
        except RequestRefusedError:
            pass  # every other request has come by then; those that are left were refused
        if asked:
            yield [LostGroup(admission=each.admission, reason="refused") for each in asked.values()]

    def take_stats(self) -> WorkerStats:
        """Statistics since the last call."""
        stats, self._stats = self._stats, WorkerStats()
        return stats

    def _request(self, id: str, asked: _Asked) -> GenerationRequest:
        return GenerationRequest(
            id=id,
            prompt_token_ids=asked.prompt.token_ids,
            num_samples=self._group_size,
            seed=request_seed(self._run_seed, asked.admission.index, 0),
            sampling=self._sampling,
            urgent=asked.admission.fresh,
        )

    async def _finish(
        self, finished: Sequence[tuple[_Asked, GenerationResult]], deadline_s: float
    ) -> list[MadeGroup | LostGroup]:
        """Score what can go on; `deadline_s` is on the loop's clock."""
        kept: list[_Asked] = []
        lost: list[MadeGroup | LostGroup] = []
        for asked, result in finished:
            completions = self._salvage(result.completions)
            if completions is None:
                lost.append(LostGroup(admission=asked.admission, reason="rollout_timeout"))
            else:
                kept.append(dataclasses.replace(asked, completions=completions))
        limit = asyncio.timeout_at(deadline_s)
        try:
            async with limit:
                return lost + [*await self._with_reference_scores(await self._score(kept))]
        except TimeoutError:
            if not limit.expired():
                raise
            return lost + [LostGroup(admission=each.admission, reason="group_timeout") for each in kept]

    def _salvage(self, completions: Completions) -> Completions | None:
        """The rollouts that were not cut off, or None when they are too few to be each other's baseline."""
        num_cut = int(completions.cut.sum())
        if not num_cut:
            return completions
        self._stats.num_cut += num_cut
        if len(completions.cut) - num_cut < self._rollout.min_rollouts:
            return None
        self._stats.num_salvaged += 1
        return completions_of([row for row in rows_of(completions) if not row.cut])

    async def _score(self, finished: Sequence[_Asked]) -> list[MadeGroup]:
        if not finished:
            return []
        generated_s = self._now_s()
        texts = self._decode([each.whole for each in finished])
        calls = [
            RewardCall(prompt=each.prompt.text, completion=text, data=each.prompt.data, truncated=bool(truncated))
            for each, group_texts in zip(finished, texts, strict=True)
            for text, truncated in zip(group_texts, each.whole.truncated, strict=True)
        ]
        outcomes = await self._rewards.score(calls)
        rewards = np.array([outcome.require() for outcome in outcomes], dtype=np.float32)
        scored_s = self._now_s()
        self._stats.score_s += scored_s - generated_s
        self._stats.groups += len(finished)
        self._stats.spans.append(("score", "work", generated_s, scored_s - generated_s))
        rows = np.split(rewards, np.cumsum([len(group_texts) for group_texts in texts])[:-1])
        whole = [each.whole for each in finished]
        found = judged(
            rows,
            [each.lengths for each in whole],
            [each.truncated for each in whole],
            self._sampling.max_new_tokens,
            self._advantage,
        )
        prompts = [each.prompt.token_ids for each in finished]
        samples = samples_of_turns(prompts, whole, [each.advantages for each in found])
        return [
            self._group(*each, generated_s, scored_s)
            for each in zip(finished, rows, found, samples, texts, strict=True)
        ]

    async def _with_reference_scores(self, made: Sequence[MadeGroup]) -> Sequence[MadeGroup]:
        """Their groups scored by the reference service, if there is one, but for those that are not trained on."""
        wanted = [each for each in made if not each.outcome]
        if self._reference is None or not wanted:
            return made
        begun_s = self._now_s()
        groups = await with_reference_scores([each.group for each in wanted], self._reference)
        ended_s = self._now_s()
        self._stats.reference_s += ended_s - begun_s
        self._stats.spans.append(("reference", "work", begun_s, ended_s - begun_s))
        scored = {group.index: group for group in groups}
        return [
            dataclasses.replace(each, group=scored.get(each.group.index, each.group), scored_s=ended_s) for each in made
        ]

    def _decode(self, groups: Sequence[Completions]) -> list[tuple[str, ...]]:
        """The texts of each group's completions, without their stop tokens."""
        tokens = np.concatenate([completions.token_ids for completions in groups])
        text = ~np.isin(tokens, self._sampling.stop_token_ids)
        ends = bounds(np.concatenate([completions.lengths for completions in groups]))
        edges, kept = bounds(text)[ends].tolist(), tokens[text].tolist()
        texts = iter(self._renderer.decode_many([kept[a:b] for a, b in pairwise(edges)]))
        return [tuple(islice(texts, len(completions.lengths))) for completions in groups]

    def _group(
        self,
        asked: _Asked,
        rewards: np.ndarray,
        found: Judged,
        whole: Samples,
        texts: tuple[str, ...],
        generated_s: float,
        scored_s: float,
    ) -> MadeGroup:
        completions = asked.whole
        drop = self._advantage.zero_variance == "refill" and found.zero_variance
        reason = "zero_variance" if drop else ""
        samples = self._limit.applied(whole)
        if samples is None:
            samples, reason = whole, "oversize"
        self._stats.num_oversize += self._limit.num_oversize(whole)
        if whole.kept_set is not None:
            self._stats.num_unknown_tokens += len(completions.token_ids) - whole.num_loss_tokens
        return MadeGroup(
            admission=asked.admission,
            group=Group(
                index=asked.admission.index,
                prompt_id=asked.admission.prompt_id,
                samples=samples,
                rewards=rewards,
            ),
            outcome="filtered" if reason else "",
            reason=reason,
            generated_s=generated_s,
            scored_s=scored_s,
            num_tokens=len(completions.token_ids),
            prompt_text=asked.prompt.text,
            completions=texts,
        )
