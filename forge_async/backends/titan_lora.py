"""Low-rank adapters (LoRA) on a torchtitan model: torchtitan's own converter, with what it leaves open settled here.

- The converter knows torchtitan's layers; `learner.lora.targets` has Hugging Face's. Keys and values share one
  description there, so a target that wants only one of them has the other's adapter taken off again.
- The converter has `A` drawn by each rank for its own shard, which on a CPU mesh gives ranks equal draws. Here each `A`
  is drawn whole, from a stream of its own name, so that it is the same on any number of ranks.
- torchtitan's adapter of names drops adapters; here they get the names of `weights.adapters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forge_async.backends import titan_cpu  # noqa: F401 - before any other part of torchtitan
from forge_async.core.rng import derive_seed
from forge_async.learner.settings import LoraSettings
from forge_async.weights.adapters import LORA_A, LORA_B, PEFT_PREFIX, is_adapter, merged, pairs, peft_config

# isort: split
import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.lora import LoRAConverter

LAYERS = {
    "q_proj": "wq", "k_proj": "wkv", "v_proj": "wkv", "o_proj": "wo", "gate_proj": "w1", "up_proj": "w3",
    "down_proj": "w2",
}  # fmt: skip
"""Hugging Face's name of a layer -> torchtitan's description of it."""
PARTS = {LORA_A: ".lora_a.weight", LORA_B: ".lora_b.weight"}
"""Our ending of a name -> torchtitan's."""


def build_with_adapters(config: Any, lora: LoraSettings) -> torch.nn.Module:
    """The model of torchtitan's description, frozen, with adapters on its targets. `config` is changed.

    Call it where a plain `config.build()` would be called, after `config.update_from_config`.
    """
    plain = [layer.attention.qkv_linear.wkv for layer in config.layers]
    targets = sorted({LAYERS[name] for name in lora.targets})
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets).build()
    model: Any = converter.convert(config).build()
    unwanted = {"k_proj": "wk", "v_proj": "wv"}.items()
    for leaf in [leaf for name, leaf in unwanted if "wkv" in targets and name not in lora.targets]:
        for layer, without in zip(model.layers.values(), plain, strict=True):
            setattr(layer.attention.qkv_linear, leaf, without.build().requires_grad_(False))
    return model


def is_titan_adapter(name: str) -> bool:
    """Whether a name of torchtitan's state dict is an adapter's."""
    return name.endswith(tuple(PARTS.values()))


def initialise(model: torch.nn.Module, seed: int) -> None:
    """Draw every `A` uniformly, as wide as torch does for a linear layer; every `B` is 0 already."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(PARTS[LORA_A]):
                draws = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
                bound = 1 / math.sqrt(parameter.shape[1])
                value = torch.empty(parameter.shape, dtype=torch.float32).uniform_(-bound, bound, generator=draws)
                value = value.to(device=parameter.device, dtype=parameter.dtype)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)


def adapters(state: Mapping[str, Any], names: Any) -> Iterator[tuple[str, Any]]:
    """(name as in `weights.adapters`, parameter) of the adapters in a state dict; `names` is torchtitan's adapter."""
    for name, parameter in state.items():
        for ours, theirs in PARTS.items():
            if name.endswith(theirs):
                (base,) = names.to_hf({name.removesuffix(theirs) + ".weight": parameter})
                yield base.removesuffix(".weight") + ours, parameter


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Have the model compute what its frozen weights alone give: what an adapter adds is multiplied by 0."""
    layers: Sequence[Any] = [module for module in model.modules() if hasattr(module, "_lora_scaling")]
    scales = [layer._lora_scaling for layer in layers]
    try:
        for layer in layers:
            layer._lora_scaling = 0.0
        yield
    finally:
        for layer, scale in zip(layers, scales, strict=True):
            layer._lora_scaling = scale


def products(adapter: Mapping[str, torch.Tensor], scale: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each whole adapter, by the name of the weights below it, with the scale multiplied in."""
    return {name: (a, b * scale) for name, a, b in pairs(adapter)}


def with_adapters(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """The weights of a model, whose adapters are among them, with these added in."""
    found = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
    adapter = {name: tensor for name, tensor in weights.items() if is_adapter(name)}
    return found | {name: merged(found[name], *halves) for name, halves in products(adapter, scale).items()}


def for_peft(
    adapter: Mapping[str, torch.Tensor], lora: LoraSettings, base: Path
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter and its configuration as PEFT writes them; `base` is the folder of the model below."""
    config = peft_config(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, base=str(base.absolute()))
    return {PEFT_PREFIX + name: tensor for name, tensor in adapter.items()}, config
