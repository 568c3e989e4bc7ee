"""Which experts each token took in vLLM, recorded beside its place in the KV cache.

Written against vLLM 0.32's first model runner; its own way of returning routed experts needs the second one, which does
not run on CPU. A token's choice is kept under the slot of its KV, so that a prompt whose prefix comes from the cache
has its choices too: they are those with which the cached KV was made. A token that is computed again overwrites them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from forge_async.backends.vllm_outputs import Outputs
from forge_async.core import routing
from forge_async.core.errors import PolicyError


class RoutingRecorder:
    """Records for one LLMEngine whose core runs in this process, and tells it by request."""

    def __init__(self, engine: Any, outputs: Outputs) -> None:
        """Watch the engine's routers. Raises PolicyError for a model without experts, or an engine that hides them."""
        runner = engine.model_executor.driver_worker.worker.model_runner
        routers = [module.router for module in runner.model.modules() if hasattr(module, "router")]
        if not routers:
            raise PolicyError("policy.keep_routing=true needs a mixture of experts, and this model is dense.")
        if not all(hasattr(each, "set_capture_fn") for each in routers) or not hasattr(runner, "input_batch"):
            raise PolicyError("policy.keep_routing=true: this vLLM does not show which experts a token takes.")
        cache, first = engine.vllm_config.cache_config, routers[0]
        self._runner, self._scheduler = runner, engine.engine_core.engine_core.scheduler
        self._outputs, self._block_tokens = outputs, cache.block_size
        nothing = np.zeros((0, len(routers), first.top_k), routing.dtype_for(first.global_num_experts))
        self._by_slot = routing.unknown(cache.num_gpu_blocks * cache.block_size, nothing)
        """[slots of the KV cache, layers, experts a token]."""
        self._chosen: list[Any] = [None] * len(routers)
        """What each router chose in the pass that runs."""
        self._rows: dict[str, tuple[int, list[str]]] = {}
        """Tokens of a request's prompt, and vLLM's inner ids of its rows, in order."""
        self._ended: dict[str, np.ndarray] = {}
        """Choices of rows that ended, by inner id."""
        for number, router in enumerate(routers):
            router.set_capture_fn(partial(self._choose, number))
        runner.execute_model = self._recorded(runner.execute_model)

    def expect(self, id: str, num_prompt: int) -> None:
        """Record for a request that has just entered, with so many tokens of prompt."""
        self._rows[id] = num_prompt, self._outputs.row_ids(id)

    def hold(self, id: str) -> None:
        """Keep what a request's rows have now: they are about to be ended."""
        for inner in self._rows.get(id, (0, ()))[1]:
            request = self._scheduler.requests.get(inner)
            if inner not in self._ended and request is not None:
                self._ended[inner] = self._choices(inner)[: request.num_computed_tokens]

    def take(self, id: str, lengths: Sequence[int]) -> np.ndarray:
        """Choices of all tokens of a request that ended, and forget it: [n * prompt + sum of lengths, layers, K].

        `lengths`: tokens of each row, without the prompt.
        """
        parts = []
        num_prompt, inners = self._rows.pop(id)
        for inner, length in zip(inners, lengths, strict=True):
            found = self._ended.pop(inner, None)
            if found is None:
                found = self._choices(inner)
            whole = routing.unknown(num_prompt + length, self._by_slot)
            count = min(len(found), num_prompt + length - 1)  # the last token was never read
            whole[:count] = found[:count]
            parts.append(whole)
        return np.concatenate(parts)

    def _choose(self, number: int, expert_ids: Any) -> None:
        self._chosen[number] = expert_ids

    def _recorded(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(step: Any, *args: Any, **kwargs: Any) -> Any:
            watched = {inner for _, inners in self._rows.values() for inner in inners}
            for inner in step.finished_req_ids & watched - self._ended.keys():
                self._ended[inner] = self._choices(inner)  # before others get its place
            made = execute(step, *args, **kwargs)
            if step.total_num_scheduled_tokens:
                self._keep(step.total_num_scheduled_tokens)
            return made

        return recorded

    def _keep(self, num_tokens: int) -> None:
        """Put down what the tokens of the pass that has run took."""
        slots = self._runner.input_batch.block_table[0].slot_mapping.gpu[:num_tokens].cpu().numpy()
        for number, chosen in enumerate(self._chosen):
            self._by_slot[slots, number] = chosen[:num_tokens].cpu().numpy()

    def _choices(self, inner: str) -> np.ndarray:
        """What the tokens in a row's blocks took, some of which it may not have reached."""
        state = self._runner.requests.get(inner)
        blocks = np.asarray(state.block_ids[0] if state is not None else (), dtype=np.int64)
        slots = blocks[:, None] * self._block_tokens + np.arange(self._block_tokens)
        return self._by_slot[slots.flatten()]
