"""A learner rank composed from torchtitan's parts: model, parallelism, optimiser, schedule, clipping.

torchtitan's Trainer is built around a data set of its own; here the parts are put together around a Share of samples.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from forge_async.backends import titan_cpu
from forge_async.backends.titan_models import model_spec

# isort: split
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.functional import cross_entropy
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_distributed
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.tools import utils as titan_utils

from forge_async.core.errors import ConfigError, NonFiniteError
from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share
from forge_async.learner.losses import LossFunction, LossTerms
from forge_async.learner.ports import StepResult
from forge_async.learner.rows import Rows, build_micro_batches, empty_rows, sequence_rows
from forge_async.learner.settings import LearnerSettings, OptimizerSettings
from forge_async.weights.manifest import Part
from forge_async.weights.packing import LocalShard, Packer

TOKENIZER_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
)  # fmt: skip


class TitanLearner:
    """One rank. Expects the environment of torch's elastic launch (RANK, WORLD_SIZE, MASTER_ADDR ...)."""

    def __init__(
        self,
        model_folder: Path,
        *,
        loss: LossFunction,
        learner: LearnerSettings,
        optimizer: OptimizerSettings,
        total_steps: int,
        seed: int,
        temperature: float = 1.0,
        publish_dtype: str = "float32",
        version: PolicyVersion | None = None,
    ) -> None:
        """Build the model on this rank's device and load the folder's weights.

        Args:
            model_folder: Hugging Face folder.
            loss: what a step minimises.
            learner, optimizer: settings; their `ranks` must equal the world size.
            total_steps: length of the learning-rate schedule, in steps.
            seed: of anything random in the model's set-up.
            temperature: the sampler's; logits are divided by it before log-probabilities are taken.
            publish_dtype: dtype of snapshots, the policy engine's.
            version: of the loaded weights; step 0 when None.
        """
        self.version = version or PolicyVersion()
        self._folder, self._loss, self._settings, self._optimizer_settings = model_folder, loss, learner, optimizer
        self._temperature = temperature
        self._publish_dtype: torch.dtype = getattr(torch, publish_dtype)
        if titan_cpu.ON_CPU:
            torch.set_num_threads(1)
        self._device = titan_utils.get_local_device()
        titan_utils.device_module.set_device(self._device)
        self._dims, self._in_context = self._set_up_distributed(seed)
        spec = model_spec(model_folder)
        self._model = self._build_model(spec)
        self._adapter = spec.state_dict_adapter(spec.model, None)  # pyright: ignore[reportOptionalCall]
        self._load_folder(model_folder)
        self._optimizer = default_adamw(
            lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), weight_decay=optimizer.weight_decay
        ).build(model_parts=[self._model])
        self._schedule = _schedule_config(optimizer).build(optimizers=self._optimizer, training_steps=total_steps)
        self._named: list[tuple[str, Any]] | None = None
        self._packer = Packer(self.rank)

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def batch_ranks(self) -> int:
        """How many shares a batch is split into (the data-parallel degree)."""
        mesh = self._dims.get_optional_mesh("batch")
        return mesh.size() if mesh is not None else 1

    @property
    def batch_rank(self) -> int:
        """Which share is this rank's."""
        mesh = self._dims.get_optional_mesh("batch")
        return mesh.get_local_rank() if mesh is not None else 0

    def train(self, share: Share) -> StepResult:
        begun = time.perf_counter()
        batches = build_micro_batches(share.samples, self._settings.row_tokens, self._settings.micro_batch_tokens)
        batches += [empty_rows()] * (self._most_over_ranks(len(batches)) - len(batches))
        denominator = max(share.num_loss_tokens, 1)
        totals = torch.zeros(5, dtype=torch.float64)
        for rows in batches:
            terms = self._forward_backward(rows, denominator)
            totals[:3] += torch.stack([terms.loss_sum.detach(), terms.clipped_tokens, terms.kl_sum]).cpu()
            totals[3] = max(float(totals[3]), float(terms.logprob_diff_max))
            totals[4] += rows.token_ids.size
        loss_sum, clipped, kl_sum, row_tokens = self._sum_over_ranks(totals[[0, 1, 2, 4]])
        grad_norm = self._apply_gradients(loss_sum / denominator, share)
        self.version = self.version.next()
        return StepResult(
            version=self.version,
            loss=loss_sum / denominator,
            grad_norm=grad_norm,
            lr=self._last_lr,
            num_loss_tokens=share.num_loss_tokens,
            num_row_tokens=int(row_tokens),
            clip_fraction=clipped / denominator,
            mismatch_kl=kl_sum / denominator,
            logprob_diff_max=self._max_over_ranks(float(totals[3])),
            compute_s=time.perf_counter() - begun,
        )

    def snapshot(self, blob: torch.Tensor | None = None) -> tuple[Part, torch.Tensor]:
        return self._packer.pack(self._local_shards(), blob)

    @property
    def snapshot_bytes(self) -> int:
        return self._packer.blob_bytes

    def score(self, token_ids: Sequence[np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad(), self._in_context():
            logprobs = self._logprobs(self._to_device(sequence_rows(token_ids))).cpu().numpy()
        return [row[: len(ids) - 1] for row, ids in zip(logprobs, token_ids, strict=True)]

    def save(self, folder: Path) -> None:
        weights = {name: tensor.cpu().clone() for name, tensor in self._full_weights()}
        if self.rank != 0:
            return
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in TOKENIZER_FILES:
            if (self._folder / name).exists():
                shutil.copy(self._folder / name, partial / name)
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in self._full_weights():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _set_up_distributed(self, seed: int) -> tuple[ParallelDims, Any]:
        self._parallelism = ParallelismConfig(
            spmd_backend="partial_dtensor",
            tensor_parallel_degree=self._settings.tensor_parallel,
            expert_parallel_degree=self._settings.expert_parallel,
        )
        world_size = titan_distributed.init_distributed(CommConfig(trace_buf_size=0))
        if world_size != self._settings.ranks:
            raise ConfigError(f"learner.ranks={self._settings.ranks}, but {world_size} learner processes were started.")
        dims = ParallelDims.from_config(self._parallelism, world_size)
        titan_distributed.set_spmd_backend(self._parallelism.spmd_backend)
        titan_distributed.set_determinism(dims, self._device, DebugConfig(seed=seed), distinct_seed_mesh_dims=["pp"])
        return dims, titan_distributed.get_spmd_context(parallel_dims=dims)

    def _build_model(self, spec: Any) -> torch.nn.Module:
        training = TrainingConfig(mixed_precision_param=self._settings.dtype)  # pyright: ignore[reportArgumentType]
        spec.model.update_from_config(config=SimpleNamespace(parallelism=self._parallelism, training=training))
        with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[training.dtype]):
            model = spec.model.build()
        recompute = {"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}
        model = spec.parallelize_fn(
            model,
            parallel_dims=self._dims,
            training=training,
            parallelism=self._parallelism,
            compile_config=CompileConfig(enable=self._settings.compile),
            ac_config=recompute[self._settings.activation_checkpointing],
            dump_folder="",
        )
        if titan_cpu.ON_CPU:
            titan_cpu.allow_gloo_reduction(model)
        model.to_empty(device=self._device.type)
        with torch.no_grad():
            model.init_states(buffer_device=None)
        return model.train()

    def _load_folder(self, folder: Path) -> None:
        loaded = self._adapter.from_hf(_read_safetensors(folder))
        own = self._model.state_dict()
        missing = sorted(set(own) - set(loaded))
        if missing:
            raise ConfigError(f"model.path={folder} lacks weights for {missing[0]} and {len(missing) - 1} more.")
        with torch.no_grad():
            for name, parameter in own.items():
                value = loaded[name].to(device=self._device, dtype=parameter.dtype)
                if tuple(value.shape) != tuple(parameter.shape):
                    raise ConfigError(
                        f"model.path={folder}: {name} has shape {tuple(value.shape)}, and config.json says "
                        f"{tuple(parameter.shape)}."
                    )
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    def _to_device(self, rows: Rows) -> dict[str, torch.Tensor]:
        columns = {name: torch.from_numpy(getattr(rows, name)) for name in Rows.__dataclass_fields__}
        return {name: column.to(self._device) for name, column in columns.items()}

    def _logprobs(self, columns: dict[str, torch.Tensor]) -> torch.Tensor:
        """float32 [B, L], log-probability of each target."""
        positions = columns["positions"]
        masks = (
            titan_cpu.document_mask(positions) if titan_cpu.ON_CPU else self._model.get_attention_masks(positions)  # pyright: ignore[reportCallIssue]
        )
        logits = self._model(columns["token_ids"], attention_masks=masks, positions=positions)
        if isinstance(logits, DTensor):
            logits = logits.full_tensor()
        logits = logits.float() if self._temperature == 1.0 else logits.float() / self._temperature
        return -cross_entropy(logits.flatten(0, 1), columns["targets"].flatten(), reduction="none").view(
            positions.shape
        )

    def _forward_backward(self, rows: Rows, denominator: int) -> LossTerms:
        columns = self._to_device(rows)
        with self._in_context():
            logprobs = self._logprobs(columns)
            terms = self._loss(logprobs, columns["behaviour_logprobs"], columns["advantages"], columns["mask"])
            (terms.loss_sum / denominator).backward()
        return terms

    def _apply_gradients(self, loss: float, share: Share) -> float:
        """Clip and step, unless loss or gradient is not finite. Returns the norm before clipping."""
        norm = titan_distributed.clip_grad_norm_(
            list(self._model.parameters()),
            self._optimizer_settings.max_grad_norm or math.inf,
            foreach=True,
            pp_mesh=None,
            ep_enabled=self._dims.ep_enabled,
        )
        self._last_lr = float(next(iter(self._optimizer)).param_groups[0]["lr"])
        finite = math.isfinite(loss) and math.isfinite(float(norm))
        if finite:
            self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad()
        if not finite:
            groups = share.group_indices
            whose = f" over groups {groups[0]}..{groups[-1]}" if groups else ""
            raise NonFiniteError(
                f"Step {self.version.step}: loss={loss} and gradient norm={float(norm)}{whose} are not finite; the "
                "weights were left as they were. Lower optimizer.lr, or look at these samples in rollouts.jsonl.zst."
            )
        return float(norm)

    def _named_parameters(self) -> list[tuple[str, Any]]:
        """(Hugging Face name, parameter), sorted; the tensors are those that the optimiser changes in place."""
        if self._named is None:
            self._named = sorted(self._adapter.to_hf(self._model.state_dict()).items())
        return self._named

    def _local_shards(self) -> Iterator[LocalShard]:
        for name, parameter in self._named_parameters():
            tensor = parameter.detach()
            shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
            if isinstance(tensor, DTensor):
                if not _holds_first_copy(tensor):
                    continue
                _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
                tensor = tensor.to_local()
            elif self.rank != 0:
                continue
            yield LocalShard(
                name=name, tensor=tensor.to(self._publish_dtype), global_shape=shape, offsets=tuple(offsets)
            )

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._named_parameters():
            tensor = parameter.detach()
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _most_over_ranks(self, value: int) -> int:
        return int(self._max_over_ranks(float(value)))

    def _max_over_ranks(self, value: float) -> float:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def _sum_over_ranks(self, values: torch.Tensor) -> list[float]:
        """Sum over the ranks that hold different shares."""
        mesh = self._dims.get_optional_mesh("batch")
        if mesh is not None and mesh.size() > 1:
            values = values.to(self._device)
            dist.all_reduce(values, group=mesh.get_group())
        return values.tolist()


def _schedule_config(optimizer: OptimizerSettings) -> LRSchedulersContainer.Config:
    constant = optimizer.decay == "constant"
    return LRSchedulersContainer.Config(
        warmup_steps=optimizer.warmup_steps,
        decay_ratio=0.0 if constant else None,
        decay_type="linear" if constant else optimizer.decay,  # pyright: ignore[reportArgumentType]
        min_lr_factor=optimizer.min_lr_factor,
    )


def _read_safetensors(folder: Path) -> dict[str, torch.Tensor]:
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


def _holds_first_copy(tensor: DTensor) -> bool:
    """Is this rank the one that speaks for its shard, among those that hold the same one?"""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        not isinstance(placement, Replicate) or place == 0
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
