"""How vLLM is told that rows have a prompt in common: as a KV connector, its way to let KV come from elsewhere.

Written against vLLM 0.32, which loads this module by its name. Here "elsewhere" is the cache itself. Before a layer's
attention vLLM asks the connector to have the layer's KV in place; on a CPU it has then written that of the step's own
tokens, a leader's among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.forward_context import get_forward_context

from forge_async.backends.vllm_prompts import Families


@dataclass
class Copies(KVConnectorMetadata):
    """Blocks of KV to be copied in a step, in every layer: from each of the first to its fellow among the second."""

    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class PromptConnector(KVConnectorBase_V1):
    """Plans copies beside vLLM's scheduler and makes them beside its worker; both are in this process.

    vLLM has one for each of the two, and the worker's serves all engines of a process: it keeps nothing of an engine.
    """

    asks_for_blocks = False
    """Whether `request_finished` does anything with the blocks of the request."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._wanted = bool(vllm_config.kv_transfer_config.kv_connector_extra_config["shares"])
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._families, self._copies = Families(), Copies()
        self._manager: Any = None
        self._blocks: tuple[torch.Tensor, torch.Tensor] | None = None
        """int64 [C] each, what the step that runs copies from and to; None: nothing."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager
        # A prompt read in chunks would not be whole in the step that its leader enters in.
        self._wanted &= not self._vllm_config.scheduler_config.enable_chunked_prefill and all(
            not layer.attn_backend.forward_includes_kv_cache_update
            for layer in self._vllm_config.compilation_config.static_forward_context.values()
            if hasattr(layer, "attn_backend")
        )

    def on_new_request(self, request: Any) -> None:
        if self._wanted:
            self._families.came(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._families.num_shared(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        leader = self._families.entered(request)
        if not num_external_tokens:
            return
        stop = request.num_prompt_tokens - 1
        copied = slice((stop - num_external_tokens) // self._block_tokens, (stop - 1) // self._block_tokens + 1)
        (own,), (given,) = blocks.get_block_ids(), self._manager.get_block_ids(leader.request_id)
        self._copies.sources += given[copied]
        self._copies.targets += own[copied]

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._families.left(request)
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        self._families.planned()
        copies, self._copies = self._copies, Copies()
        return copies

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies = self._get_connector_metadata()
        assert isinstance(copies, Copies)
        if copies.sources:
            self._blocks = torch.tensor(copies.sources), torch.tensor(copies.targets)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._blocks is None:
            return
        sources, targets = self._blocks
        cache = get_forward_context().no_compile_layers[layer_name].kv_cache
        # Whole blocks: what the last has beyond the prompt its row writes before it reads it, and the last token of the
        # prompt, which the row has written already, is the leader's too.
        cache.index_copy_(0, targets, cache.index_select(0, sources))  # [blocks, ...]

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing leaves the cache."""

    def wait_for_save(self) -> None:
        """The step ends. The next one begins with `start_load_kv` only where it has something to copy."""
        self._blocks = None
