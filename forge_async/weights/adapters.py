"""Low-rank adapters as they travel: names, the product with the weights below them, and the folder that PEFT reads.

An adapter of a layer W is two matrices; the layer then is W + s B A, with s = alpha / rank (LoRA; Hu et al., 2021,
arXiv 2106.09685). On the way to replicas s is multiplied into B already, so that what an engine holds is, bit for bit,
what was published. In a folder for PEFT it is not: PEFT multiplies by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_async.core.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    import torch

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
PEFT_PREFIX = "base_model.model."
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PLAIN: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
}
"""Keys of PEFT's configuration that change what an adapter means -> the values under which it means what is said above.
A key that is missing has the first of them."""


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is an adapter's."""
    return name.endswith((LORA_A, LORA_B))


def layer_of(name: str) -> str:
    """The name of the weights that an adapter's matrix lies on."""
    return name.removesuffix(LORA_A).removesuffix(LORA_B) + ".weight"


def pairs(weights: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(name of the weights below, A, B) of every adapter among `weights`.

    Raises WeightsError for an A without its B, or the other way round.
    """
    for name in sorted({layer_of(name) for name in weights if is_adapter(name)}):
        a, b = (weights.get(name.removesuffix(".weight") + part) for part in (LORA_A, LORA_B))
        if a is None or b is None:
            raise WeightsError(f"The adapter of {name} has only one of its two matrices; publish or save it anew.")
        yield name, a, b


def merged(weights: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """weights + b a, computed in float32 from the frozen weights and rounded once.

    Args:
        weights: [out, in], or a box of them.
        a: [rank, in], the columns of the box.
        b: [out, rank], the rows of the box, with the scale multiplied in.
    """
    import torch

    return torch.addmm(weights.float(), b.float(), a.float()).to(weights.dtype)


def merge_all(weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's weights with an adapter added in.

    Raises WeightsError when the adapter is not for these weights.
    """
    whole = dict(weights)
    for name, a, b in pairs(adapter):
        below = whole.get(name)
        if below is None or tuple(below.shape) != (b.shape[0], a.shape[1]):
            has = "none" if below is None else f"{tuple(below.shape)}"
            raise WeightsError(
                f"The adapter of {name} is for weights of shape {(b.shape[0], a.shape[1])}, and the model has {has}; "
                "give the model that it was trained on."
            )
        whole[name] = merged(below, a, b)
    return whole


def peft_config(*, rank: int, alpha: float, targets: list[str], base: str) -> dict[str, Any]:
    """What PEFT writes into adapter_config.json; `base` is the folder or the hub's name of the model below."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
    }


def is_peft_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's format."""
    return (folder / PEFT_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """The folder of the model that a PEFT folder's adapter is for.

    Raises ConfigError when it is not on this machine.
    """
    base = str(_read_config(folder).get("base_model_name_or_path") or "")
    found = next((each for each in (Path(base), folder / base) if base and (each / "config.json").is_file()), None)
    if found is None:
        raise ConfigError(
            f"{folder} holds an adapter for the model {base or '(not named)'}, which is no folder with a config.json "
            f"here; write the model's folder as base_model_name_or_path into {folder / PEFT_CONFIG}."
        )
    return found.resolve()


def read_peft(folder: Path) -> dict[str, torch.Tensor]:
    """The adapter in a folder, by our names, with its scale multiplied into B.

    Raises ConfigError when it is of a kind that means something else, or cannot be read.
    """
    from safetensors.torch import load_file

    config = _read_config(folder)
    for key, allowed in PLAIN.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(f"{folder} has {key}={config[key]} in {PEFT_CONFIG}, which is not supported.")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    try:
        found = load_file(folder / PEFT_WEIGHTS)
    except Exception as error:  # noqa: BLE001 - safetensors raises its own error type for a damaged file
        raise ConfigError(f"{folder / PEFT_WEIGHTS} cannot be read as safetensors: {error}.") from error
    named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in found.items()}
    return {name: tensor * scale if name.endswith(LORA_B) else tensor for name, tensor in named.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / PEFT_CONFIG).read_text())
    except ValueError as error:
        raise ConfigError(f"{folder / PEFT_CONFIG} is not JSON: {error}.") from error
