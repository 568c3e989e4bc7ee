"""The numbers that vLLM's sampler on a CPU draws from, taken from each row's generator many at a time.

Written against vLLM 0.32. For every token it asks the generator of each row with a seed for one number, which costs
more than the draw itself: 4% of an engine of a small model. A generator gives the same numbers when it is asked for
several at once, so a row's are taken ahead and kept: the tokens stay the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from forge_async.core.errors import PolicyError

NUM_AHEAD = 16
"""Numbers taken from a generator at a time; one is used a token."""
HIGHEST = 2**31
"""Numbers lie below it."""


class SeedsAhead:
    """Draws tokens in place of one vLLM sampler (`TopKTopPSampler.forward_cpu`), from the same numbers."""

    def __init__(self, sampler: Any) -> None:
        """Take the sampler's place. Raises PolicyError where its draws are not the same."""
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        self._leave_out = apply_top_k_top_p
        self._ahead: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()
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
            seeds[list(generators)] = torch.tensor([self._next(each) for each in generators.values()])
        tokens = torch.ops._C.fused_gumbel_argmax(logits.to(torch.float32), seeds)
        return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)

    def _next(self, generator: torch.Generator) -> int:
        ahead = self._ahead.get(generator)
        if not ahead:
            ahead = torch.randint(0, HIGHEST, (NUM_AHEAD,), generator=generator).tolist()[::-1]
            self._ahead[generator] = ahead
        return ahead.pop()

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
