"""A torchtitan model built for this rank's mesh, with the weights of a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forge_async.backends import titan_cpu
from forge_async.backends.titan_models import model_spec

# isort: split
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools import utils as titan_utils

from forge_async.backends import titan_lora
from forge_async.core.errors import ConfigError
from forge_async.core.packages import require_compiler
from forge_async.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from forge_async.weights.adapters import base_folder, is_peft_folder, merge_all, read_peft


def load_model(
    folder: Path,
    settings: LearnerSettings,
    parallelism: ParallelismConfig,
    dims: ParallelDims,
    device: torch.device,
    *,
    lora: LoraSettings | None = None,
    seed: int = 0,
) -> tuple[Any, Any]:
    """The sharded model of a Hugging Face folder, and the adapter of its names.

    With `lora` its weights are frozen and have adapters on them, which `seed` draws and which change nothing yet.

    Raises ConfigError for a folder that lacks weights or whose architecture is not supported.
    """
    spec = model_spec(folder)
    model = _build(spec, settings, parallelism, dims, device, lora)
    adapter = spec.state_dict_adapter(spec.model, None)  # pyright: ignore[reportOptionalCall]
    _load_weights(model, adapter, folder, device)
    titan_lora.initialise(model, seed)
    return model, adapter


def schedule_config(optimizer: OptimizerSettings) -> LRSchedulersContainer.Config:
    """The learning rate over a run, in torchtitan's words."""
    constant = optimizer.decay == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=optimizer.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else optimizer.decay,  # pyright: ignore[reportArgumentType]
        min_lr_factor=optimizer.min_lr_factor,
    )


def check_same_tokens(folder: Path, teacher: Path) -> None:
    """Raise ConfigError when both folders have a tokenizer.json and the same id stands for another token."""
    ours, theirs = (_vocabulary(each) for each in (folder, teacher))
    if ours and theirs and ours != theirs:
        odd = next(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
        raise ConfigError(
            f"objective.teacher={teacher} has another tokenizer than the model in {folder}: token {odd!r} has id "
            f"{theirs.get(odd)} there and {ours.get(odd)} here; give a teacher with the model's own tokenizer."
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token to id; empty where the folder does not say, or a list of pieces stands for it."""
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text()).get("model", {}).get("vocab") if path.is_file() else None
    return found if isinstance(found, dict) else {}


def _build(
    spec: Any,
    settings: LearnerSettings,
    parallelism: ParallelismConfig,
    dims: ParallelDims,
    device: torch.device,
    lora: LoraSettings | None,
) -> torch.nn.Module:
    if settings.compile and titan_cpu.ON_CPU:
        require_compiler(feature="learner.compile=true")
    training = TrainingConfig(mixed_precision_param=settings.dtype)  # pyright: ignore[reportArgumentType]
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism, training=training))
    with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
        model = titan_lora.build_with_adapters(spec.model, lora) if lora else spec.model.build()
    recompute = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=settings.compile),
        ac_config=recompute[settings.activation_checkpointing],
        dump_folder="",
    )
    if titan_cpu.ON_CPU:
        titan_cpu.allow_gloo_reduction(model)
    model.to_empty(device=device.type)
    with torch.no_grad():
        model.init_states(buffer_device=None)
    return model.train()


def _load_weights(model: torch.nn.Module, adapter: Any, folder: Path, device: torch.device) -> None:
    loaded = adapter.from_hf(_read_safetensors(folder))
    own = {name: each for name, each in model.state_dict().items() if not titan_lora.is_titan_adapter(name)}
    missing = sorted(set(own) - set(loaded))
    if missing:
        raise ConfigError(f"model.path={folder} lacks weights for {missing[0]} and {len(missing) - 1} more.")
    with torch.no_grad():
        for name, parameter in own.items():
            value = loaded[name].to(device=device, dtype=parameter.dtype)
            if tuple(value.shape) != tuple(parameter.shape):
                raise ConfigError(
                    f"model.path={folder}: {name} has shape {tuple(value.shape)}, and config.json says "
                    f"{tuple(parameter.shape)}."
                )
            if isinstance(parameter, DTensor):
                value, parameter = value[box(parameter)], parameter.to_local()
            parameter.copy_(value)


def box(parameter: DTensor) -> tuple[slice, ...]:
    """What of the whole this rank holds.

    Asked of the mesh, since torch cannot distribute a tensor that is cut twice along one dimension (FSDP2 over tensor
    parallelism).
    """
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(low, low + size) for low, size in zip(offsets, shape, strict=True))


def _read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    if is_peft_folder(folder):
        return merge_all(_read_safetensors(base_folder(folder)), read_peft(folder))
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path={folder} has no .safetensors file; convert the model to safetensors first.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file))
        except Exception as error:  # noqa: BLE001 - safetensors raises its own error type for a damaged file
            raise ConfigError(f"{file} cannot be read as safetensors: {error}.") from error
    return weights
