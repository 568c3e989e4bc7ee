"""The one adapter of a vLLM engine: vLLM's own layers with low-rank adapters, whose memory is written between steps.

Every request names the same adapter, whose contents change with each version, for those in flight too, as with whole
weights: what they keep of the old version is the swap mode's matter. Written against vLLM 0.32, which takes adapters
from disk only; the place where its layers keep them is plain memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.learner.settings import LoraSettings
from forge_async.weights.adapters import LORA_A, LORA_B, is_adapter

ID = 1
"""vLLM's number of the adapter."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
"""Layers that vLLM fuses, by Hugging Face's name."""


def engine_arguments(lora: LoraSettings | None, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is told at its start. On a CPU it is also given our own products (`vllm_one_adapter.py`)."""
    if lora is None:
        return {}
    if on_cpu:
        from vllm.platforms import current_platform

        kernel = "forge_async.backends.vllm_one_adapter.OneAdapter"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: kernel)  # pyright: ignore
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "lora_target_modules": sorted({FUSED.get(name, name) for name in lora.targets}),
    }


class AdapterSlot:
    """The adapter of one engine, empty at first: then the engine is what its weights are."""

    def __init__(self, runner: Any, lora: LoraSettings) -> None:
        """`runner`: vLLM's model runner."""
        from vllm.lora.request import LoRARequest

        manager = runner.lora_manager._adapter_manager
        manager.add_adapter(manager.create_dummy_lora(ID, lora.rank, runner.get_model().embedding_modules))
        manager.activate_adapter(ID)
        self.request = LoRARequest("policy", ID, "memory")
        """What every request names."""
        self._places = dict(_places(manager, lora))
        self.clear()
        for module in manager.modules.values():
            module.load_weights = _loader_of(module.base_layer)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """(name, matrix) of what the engine computes with, for the names that are the adapter's."""
        yield from ((name, self._places[name]) for name in names if name in self._places)

    def check(self, weights: Mapping[str, Any], version: PolicyVersion, served: PolicyVersion) -> None:
        """Raise WeightsError for the first matrix that has no place or another shape or dtype."""
        for name, tensor in weights.items():
            held = self._places.get(name)
            if held is None or tuple(tensor.shape) != tuple(held.shape) or tensor.dtype != held.dtype:
                has = "no place for it" if held is None else f"{held.dtype} {tuple(held.shape)}"
                raise WeightsError(
                    f"{version} has {name} as {tensor.dtype} {tuple(tensor.shape)}, and the engine has {has}; it goes "
                    f"on with {served}. Check that learner.lora is the same for learner and policy."
                )

    def write(self, weights: Mapping[str, Any]) -> None:
        """Make this the adapter; every matrix fits."""
        if len(weights) < len(self._places):
            self.clear()
        for name, tensor in weights.items():
            self._places[name].copy_(tensor)

    def clear(self) -> None:
        """Make it add nothing."""
        for held in self._places.values():
            held.zero_()


def adapters_of(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights without the adapters among them, and these."""
    adapter = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    return {name: tensor for name, tensor in weights.items() if name not in adapter}, adapter


def _places(manager: Any, lora: LoraSettings) -> Iterator[tuple[str, Any]]:
    """Where each matrix of the adapter lies: views of what vLLM's layers compute with."""
    slot = manager.lora_index_to_id.index(ID)
    for path, module in manager.modules.items():
        parent, _, leaf = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(leaf, [leaf])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if part in lora.targets:
                yield f"{parent}.{part}{LORA_A}", a[slot, 0, : lora.rank]
                yield f"{parent}.{part}{LORA_B}", b[slot, 0, :, : lora.rank]


def _loader_of(base_layer: Any) -> Any:
    """How a layer with an adapter loads the weights below it: as the layer alone would. vLLM looks for it by name."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    own = getattr(base_layer, "load_weights", None)  # fused layers have one
    return own or (lambda weights: list(AutoWeightsLoader(base_layer).load_weights(weights)))
