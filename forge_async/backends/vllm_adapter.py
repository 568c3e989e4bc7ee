"""The adapters of a vLLM engine: vLLM's own layers with low-rank adapters, whose memory is written between steps.

A request names the adapter that is current when it enters. A new version is written over that one, and so changes for
requests in flight too, as whole weights do; or it goes beside it into a slot that nobody uses, and requests in flight
end with the one that they began with. Written against vLLM 0.32, which takes adapters from disk only; the place where
its layers keep them is plain memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge_async.core.errors import PolicyError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.learner.settings import LoraSettings
from forge_async.weights.adapters import LORA_A, LORA_B, is_adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM makes room for."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
"""Layers that vLLM fuses, by Hugging Face's name."""


def engine_arguments(lora: LoraSettings | None, num_slots: int, on_cpu: bool) -> dict[str, Any]:
    """What vLLM is told at its start. On a CPU it is also given our own products (`vllm_adapter_products.py`)."""
    if lora is None:
        return {}
    if on_cpu:
        from vllm.platforms import current_platform

        kernel = "forge_async.backends.vllm_adapter_products.AdapterProducts"
        type(current_platform).get_punica_wrapper = classmethod(lambda cls: kernel)  # pyright: ignore
    return {
        "enable_lora": True,
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "lora_target_modules": sorted({FUSED.get(name, name) for name in lora.targets}),
    }


class AdapterSlots:
    """Places for adapters in one engine, all empty at first: then the engine is what its weights are."""

    def __init__(self, runner: Any, lora: LoraSettings, num_slots: int, version: PolicyVersion) -> None:
        """Args:
        runner: vLLM's model runner.
        lora: rank and layers.
        num_slots: so many adapters are held at once.
        version: of what the engine serves with empty slots.
        """
        from vllm.lora.request import LoRARequest

        manager = runner.lora_manager._adapter_manager
        numbers = range(1, num_slots + 1)  # vLLM's, of adapters
        for number in numbers:
            manager.add_adapter(manager.create_dummy_lora(number, lora.rank, runner.get_model().embedding_modules))
            manager.activate_adapter(number)
        self._requests = [LoRARequest(f"policy {number}", number, "memory") for number in numbers]
        self._places = [dict(_places(manager, lora, number)) for number in numbers]
        self._versions = [version] * num_slots
        self._current = 0
        self._slots: dict[str, int] = {}
        """The slot of each request in flight."""
        for places in self._places:
            _clear(places)

    def enter(self, id: str) -> Any:
        """What a request that enters the engine now names."""
        self._slots[id] = self._current
        return self._requests[self._current]

    def leave(self, id: str) -> PolicyVersion:
        """The last version that served a request, which has ended."""
        return self._versions[self._slots.pop(id)]

    def spare(self) -> int | None:
        """A slot that no request uses, and that is not the current one."""
        used = {self._current, *self._slots.values()}
        return next((slot for slot in range(len(self._places)) if slot not in used), None)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """(name, matrix) of what the engine computes with, for the names that are the current adapter's."""
        places = self._places[self._current]
        yield from ((name, places[name]) for name in names if name in places)

    def check(self, weights: Mapping[str, Any], version: PolicyVersion, served: PolicyVersion) -> None:
        """Raise WeightsError for the first matrix that has no place or another shape or dtype."""
        for name, tensor in weights.items():
            held = self._places[0].get(name)
            if held is None or tuple(tensor.shape) != tuple(held.shape) or tensor.dtype != held.dtype:
                has = "no place for it" if held is None else f"{held.dtype} {tuple(held.shape)}"
                raise WeightsError(
                    f"{version} has {name} as {tensor.dtype} {tuple(tensor.shape)}, and the engine has {has}; it goes "
                    f"on with {served}. Check that learner.lora is the same for learner and policy."
                )

    def write(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Make this the current adapter, for requests in flight too; every matrix fits."""
        self._write(self._current, weights, version)

    def write_beside(self, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        """Make this the adapter of requests that come from now on. Raises PolicyError when every slot is in use."""
        slot = self.spare()
        if slot is None:
            raise PolicyError(f"{version} has no place beside the adapters of the requests in flight; load it later.")
        self._write(slot, weights, version)
        self._current = slot

    def _write(self, slot: int, weights: Mapping[str, Any], version: PolicyVersion) -> None:
        places = self._places[slot]
        if len(weights) < len(places):
            _clear(places)
        for name, tensor in weights.items():
            places[name].copy_(tensor)
        self._versions[slot] = version


def _clear(places: Mapping[str, Any]) -> None:
    """Make an adapter add nothing."""
    for held in places.values():
        held.zero_()


def adapters_of(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights without the adapters among them, and these."""
    adapter = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    return {name: tensor for name, tensor in weights.items() if name not in adapter}, adapter


def _places(manager: Any, lora: LoraSettings, number: int) -> Iterator[tuple[str, Any]]:
    """Where each matrix of an adapter lies: views of what vLLM's layers compute with."""
    slot = manager.lora_index_to_id.index(number)
    for path, module in manager.modules.items():
        parent, _, leaf = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(leaf, [leaf])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            if part in lora.targets:
                yield f"{parent}.{part}{LORA_A}", a[slot, 0, : lora.rank]
                yield f"{parent}.{part}{LORA_B}", b[slot, 0, :, : lora.rank]
