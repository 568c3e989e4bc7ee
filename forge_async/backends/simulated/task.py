"""A task without content: prompts, text and rewards of the simulation."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from forge_async.backends.simulated.times import RewardTimes
from forge_async.core.clock import Clock
from forge_async.core.errors import ForgeError
from forge_async.core.records import Prompt, PromptId
from forge_async.core.rng import derive_seed
from forge_async.reward.ports import RewardCall, RewardOutcome

PROMPT_TOKEN = 4


class SimulatedSource:
    """Numbered prompts of equal length."""

    name = "simulated"

    def __init__(self, num_prompts: int, prompt_tokens: int) -> None:
        self._num_prompts, self._prompt_tokens = num_prompts, prompt_tokens

    def __len__(self) -> int:
        return self._num_prompts

    def prompt(self, id: PromptId) -> Prompt:
        if id.source != self.name or not 0 <= id.index < self._num_prompts:
            raise ForgeError(f"{id} is not one of the {self._num_prompts} prompts of {self.name}.")
        tokens = np.full(self._prompt_tokens, PROMPT_TOKEN, dtype=np.int32)
        return Prompt(id=id, token_ids=tokens, text=str(id), data={"id": id})

    def held_out(self, num_prompts: int) -> list[Prompt]:
        return []


class SimulatedRenderer:
    """Text is what a token sequence's length is called."""

    stop_token_ids, pad_token_id, vocab_size = (2,), 0, 8

    def render(self, text: str, system: str = "") -> np.ndarray:
        return np.full(max(len(text + system), 1), PROMPT_TOKEN, dtype=np.int32)

    def render_messages(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        return self.render("".join(message["content"] for message in messages))

    def encode(self, text: str) -> np.ndarray:
        return self.render(text)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        return f"{len(token_ids)} tokens"

    def decode_many(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


class SimulatedRewards:
    """A RewardPool that sleeps: completions take a slot each, in the order of their arrival. Values are 0 or 1."""

    def __init__(self, times: RewardTimes, clock: Clock, seed: int = 0) -> None:
        self.busy_s = 0.0
        """Seconds of work, spread evenly over the slots."""
        self._times, self._clock, self._seed = times, clock, seed
        self._free_at_s = [0.0] * times.num_slots
        """Heap of the times at which each slot is free."""
        self._num_calls = 0

    async def start(self) -> None: ...

    async def score(self, calls: Sequence[RewardCall]) -> list[RewardOutcome]:
        now_s, ends_s = self._clock.now_s(), 0.0
        for _ in calls if self._times.call_s else ():
            ends_s = max(now_s, self._free_at_s[0]) + self._times.call_s
            heapq.heapreplace(self._free_at_s, ends_s)
        self.busy_s += len(calls) * self._times.call_s / self._times.num_slots
        if ends_s > now_s:
            await self._clock.sleep(ends_s - now_s)
        return [RewardOutcome(value=self._value(number, call)) for number, call in enumerate(calls)]

    async def close(self) -> None: ...

    def _value(self, number: int, call: RewardCall) -> float:
        """A coin for each completion; the same one for the same prompt, place and completion."""
        return float(derive_seed(self._seed, "reward", call.prompt, call.completion, number) & 1)
