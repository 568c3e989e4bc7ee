"""The numbers that vLLM's sampler on a CPU draws from, taken from each row's generator many at a time.

Written against vLLM 0.32. For every token it asks the generator of each row with a seed for one number, which costs
more than the draw itself: 4% of an engine of a small model. A generator gives the same numbers when it is asked for
several at once, so a row's are taken ahead and kept: the tokens stay the same bit for bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from forge_async.core.errors import PolicyError

NUM_AHEAD = 16
"""Numbers taken from a generator at a time; one is used a token."""
HIGHEST = 2**31
"""Numbers lie below it."""


class NumbersAhead:
    """Numbers of generators, in the order in which each gives them, taken from it many at a time."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[torch.Generator], list[int]]] = {}
        """By the generator's id, while it lives: a dictionary of weak keys would make a key for every number."""

    def __len__(self) -> int:
        return len(self._kept)

    def next(self, generators: Iterable[torch.Generator]) -> list[int]:
        """The next number of each, below HIGHEST."""
        kept, numbers = self._kept, list[int]()
        for generator in generators:
            _, own = kept.get(id(generator)) or self._entered(generator)
            if not own:
                own += torch.randint(0, HIGHEST, (NUM_AHEAD,), generator=generator).tolist()[::-1]
            numbers.append(own.pop())
        return numbers

    def _entered(self, generator: torch.Generator) -> tuple[weakref.ref[torch.Generator], list[int]]:
        kept, key = self._kept, id(generator)
        # Forgotten as it dies, before another can have its id.
        entry = kept[key] = weakref.ref(generator, lambda _: kept.pop(key, None)), list[int]()
        return entry


class SeedsAhead:
    """Draws tokens in place of one vLLM sampler (`TopKTopPSampler.forward_cpu`), from the same numbers."""

    def __init__(self, sampler: Any) -> None:
        """Take the sampler's place. Raises PolicyError where its draws are not the same."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._leave_out = apply_top_k_top_p
        self._ahead = NumbersAhead()
        if getattr(sampler, "logprobs_mode", "") != "processed_logprobs" or not self._is_like(sampler.forward):
            raise PolicyError(
                "vLLM's sampler on a CPU does not draw as that of vLLM 0.32 does, for which forge_async is written; "
                "install the locked version with `make setup`."
            )
        sampler.forward = self.draw

    def draw(
        self,
        logits: torch.Tensor,
        generators: Mapping[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B], a token for each row of `logits` [B, V], and float32 [B, V], the log-probabilities of all.

        Args:
            generators: of the rows that have one; the others draw from torch's own.
            k, p: [B], so many of the likeliest tokens, or so much probability, is drawn from; None: all.
        """
        logits = self._leave_out(logits, k, p)
        seeds = torch.randint(0, HIGHEST, (len(logits),))
        if generators:
            seeds[list(generators)] = torch.tensor(self._ahead.next(generators.values()))
        tokens = torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds)
        return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)

    def _is_like(self, forward: Any) -> bool:
        """Whether `forward` makes the same tokens and log-probabilities, over more numbers than are taken at a time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            many = torch.randn(NUM_AHEAD + 2, 3, 64)
            own, given = ({row: torch.Generator().manual_seed(row) for row in (2, 0)} for _ in range(2))
            for logits in many:
                state = torch.get_rng_state()
                wanted = forward(logits.clone(), given, None, None)
                torch.set_rng_state(state)
                drawn = self.draw(logits.clone(), own, None, None)
                if not all(torch.equal(ours, theirs) for ours, theirs in zip(drawn, wanted, strict=True)):
                    return False
        return True
