"""A learner rank composed from torchtitan's parts: model, parallelism, optimiser, schedule, clipping.

torchtitan's Trainer is built around a data set of its own; here the parts are put together around a Share of samples.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from forge_async.backends import titan_moe
from forge_async.backends.titan_world import join_world, leave_world

# isort: split
import torch
import torch.distributed as dist
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed import utils as titan_distributed

from forge_async.backends import titan_lora, titan_state
from forge_async.backends.model_writer import write_model
from forge_async.backends.titan_build import load_model, schedule_config
from forge_async.backends.titan_forward import forward
from forge_async.backends.titan_frozen import CameWithSamples, Frozen, FrozenScores, OwnModels, load_frozen
from forge_async.backends.titan_values import ValueHead
from forge_async.backends.titan_weights import NamedWeights
from forge_async.core.errors import NonFiniteError
from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share
from forge_async.learner.counts import Counts
from forge_async.learner.figures import step_figures, total_loss
from forge_async.learner.frozen import frozen_folders
from forge_async.learner.inputs import LossInputs
from forge_async.learner.loss import Loss, LossTerms
from forge_async.learner.mixture import load_figures
from forge_async.learner.ports import StepResult
from forge_async.learner.rows import COLUMNS, OPTIONAL_COLUMNS, Rows, build_micro_batches, sequence_rows
from forge_async.learner.settings import LearnerSettings, LoraSettings, OptimizerSettings
from forge_async.learner.token_scores import Wanted
from forge_async.learner.totals import NOBODY, Figures, StepTotals, first_bad_sample, merge_updates, not_finite
from forge_async.weights.adapters import is_adapter
from forge_async.weights.copy_out import CopyOut
from forge_async.weights.manifest import Part
from forge_async.weights.packing import LocalShard, Packer, unpacked

Known: TypeAlias = dict[str, torch.Tensor]
"""Fields of LossInputs for a micro-batch, [B, L] each."""


class TitanLearner:
    """One rank. Expects the environment of torch's elastic launch (RANK, WORLD_SIZE, MASTER_ADDR ...)."""

    def __init__(
        self,
        model_folder: Path,
        *,
        loss: Loss,
        learner: LearnerSettings,
        optimizer: OptimizerSettings,
        total_steps: int,
        seed: int,
        temperature: float = 1.0,
        publish_dtype: str = "float32",
        version: PolicyVersion | None = None,
        lora: LoraSettings | None = None,
        merge_adapters: bool = False,
        reads_frozen: bool = True,
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
            lora: adapters that are trained in place of the model; None, or of rank 0: the model.
            merge_adapters: whether snapshots and checkpoints are of the whole model with its adapters added in.
            reads_frozen: whether what reference and teacher give is computed here; without, it comes with the samples.
        """
        self.version = version or PolicyVersion()
        self._folder, self._loss, self._settings, self._optimizer_settings = model_folder, loss, learner, optimizer
        self._wanted = Wanted(temperature=temperature, chunk_tokens=learner.logit_chunk_tokens)
        self._world = join_world(learner, seed)
        self._device, self._dims, self._in_context = self._world.device, self._world.dims, self._world.in_context
        self._lora, self._merges = lora if lora and lora.rank else None, merge_adapters
        self._scale = self._lora.scale if self._lora else 1.0
        self._model, names = load_model(
            model_folder, learner, self._world.parallelism, self._dims, self._device, lora=self._lora, seed=seed
        )
        self._optimizer = default_adamw(
            lr=optimizer.lr, betas=(optimizer.beta1, optimizer.beta2), weight_decay=optimizer.weight_decay
        ).build(model_parts=[self._model])
        self._schedule = schedule_config(optimizer).build(optimizers=self._optimizer, training_steps=total_steps)
        self._weights = NamedWeights(
            self._model,
            names,
            rank=self.rank,
            dtype=getattr(torch, publish_dtype),
            lora_scale=self._scale,
            merges=merge_adapters,
        )
        self._packer, self._adapter_packer, self._copy_out = Packer(self.rank), Packer(self.rank), CopyOut()
        self.base = ""
        """The version whose snapshot holds what is frozen, so that later ones hold adapters only; "" before it."""
        self._checksum: torch.Tensor | None = None
        self._frozen_scores = self._frozen(reads_frozen)
        self._values = self._value_head() if loss.needs_values else None

    @property
    def rank(self) -> int:
        """This process's rank, from 0."""
        return self._world.rank

    @property
    def batch_ranks(self) -> int:
        """How many shares a batch is split into (the data-parallel degree)."""
        return self._world.batch_ranks

    @property
    def batch_rank(self) -> int:
        """Which share is this rank's."""
        return self._world.batch_rank

    def train(self, share: Share) -> StepResult:
        begun, counts = time.perf_counter(), share.counts
        parts, updates, grad_norm = self._prepared(share), [], 0.0
        titan_moe.take_load(self._model)
        for update in range(self._settings.updates_per_batch):
            totals, blamed = StepTotals(), NOBODY
            own_counts, batches = parts[update % len(parts)]
            for rows, known in batches:
                terms = self._forward_backward(rows, own_counts, known, update)
                if not totals.add(terms, rows) and blamed == NOBODY:
                    blamed = first_bad_sample(terms, rows, share)
            updates.append(self._over_ranks(totals))
            grad_norm = self._apply_gradients(total_loss(updates[-1][0]), share, blamed, update)
        self._schedule.step()
        self.version = self.version.next()
        sums, maxima = merge_updates(updates, len(parts))
        num_tokens = max(counts.num_loss_tokens, 1)
        return StepResult(
            version=self.version,
            loss=total_loss(sums),
            grad_norm=grad_norm,
            lr=self._last_lr,
            num_loss_tokens=counts.num_loss_tokens,
            num_row_tokens=int(sums["row_tokens"]),
            num_sample_tokens=int(sums["sample_tokens"]),
            clip_fraction=sums["clipped"] / num_tokens,
            mismatch_kl=sums["mismatch_kl"] / num_tokens,
            logprob_diff_max=maxima["logprob_diff"],
            compute_s=time.perf_counter() - begun,
            figures=step_figures(sums, maxima, counts)
            | self._router_figures()
            | {"staleness/extra_updates": len(updates) - 1.0},
        )

    def snapshot(self, blob: torch.Tensor | None = None) -> tuple[Part, torch.Tensor]:
        self._copy_out.wait()
        packer, shards = self._to_pack()
        return packer.pack(shards, blob)

    def begin_snapshot(self, copier: Executor, blob: torch.Tensor | None = None) -> Future[tuple[Part, torch.Tensor]]:
        packer, shards = self._to_pack()
        return self._copy_out.begin(copier, lambda: packer.pack(shards, blob))

    def forget_base(self) -> None:
        """Whoever has the last whole snapshot is gone: the next one is whole again, and in other memory."""
        self.base = ""
        self._packer.forget_memory()
        self._adapter_packer.forget_memory()

    def whole(self, part: Part, blob: torch.Tensor) -> tuple[Part, torch.Tensor]:
        """The whole model of an older snapshot that holds adapters only: what is frozen never changes."""
        frozen = self._weights.shards(lambda name: not is_adapter(name))
        return self._packer.pack(sorted([*frozen, *unpacked(part, blob)], key=lambda shard: shard.name))

    @property
    def snapshot_bytes(self) -> int:
        return (self._adapter_packer if self.base else self._packer).blob_bytes

    def score(self, token_ids: Sequence[np.ndarray], temperature: float = 0.0) -> list[np.ndarray]:
        wanted = replace(self._wanted, temperature=temperature or self._wanted.temperature)
        with torch.no_grad(), self._in_context():
            rows = self._to_device(sequence_rows(token_ids))
            logprobs = forward(self._model, rows, wanted).logprobs.cpu().numpy()
        return [row[: len(ids) - 1] for row, ids in zip(logprobs, token_ids, strict=True)]

    def save(self, folder: Path) -> None:
        alone, weights = self._lora is not None and not self._merges, {}
        for name, tensor in self._weights.full(is_adapter if alone else _all):
            if self.rank == 0:  # each is put together on all ranks; only one keeps it
                weights[name] = tensor.cpu().clone()
        if self.rank != 0:
            return
        if self._lora and alone:
            write_model(folder, self._folder, *titan_lora.for_peft(weights, self._lora, self._folder))
        else:
            write_model(folder, self._folder, titan_lora.with_adapters(weights, self._scale), {})

    def save_state(self, folder: Path) -> None:
        titan_state.save(folder, self._state())

    def restore(self, folder: Path, version: PolicyVersion) -> None:
        self._copy_out.wait()
        titan_state.load(folder, self._state())
        titan_state.go_on_from(self._schedule, version.step)
        self.version = version

    def digest(self) -> str:
        found = hashlib.sha256()
        for name, tensor in self._weights.full():
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        """Leave the process group."""
        leave_world()

    def _frozen(self, reads: bool) -> FrozenScores:
        folders = frozen_folders(self._loss.settings, self._folder)
        if not reads:
            return CameWithSamples(tuple(folders))
        own = {}
        if self._lora and folders.pop("reference_logprobs", None):
            own["reference_logprobs"] = Frozen(
                model=self._model, during=lambda: titan_lora.without_adapters(self._model)
            )
        loaded = load_frozen(folders, self._settings, self._world, policy_folder=self._folder)
        return OwnModels(own | loaded, self._wanted)

    def _value_head(self) -> ValueHead:
        mesh = self._dims.get_optional_mesh("batch")
        group = mesh.get_group() if mesh is not None and mesh.size() > 1 else None
        return ValueHead(self._model, self._device, self._optimizer_settings, self._loss, group)

    def _to_pack(self) -> tuple[Packer, list[LocalShard]]:
        """What the next snapshot has, and what packs it; whatever is collective about it happens here."""
        if self.base:
            return self._adapter_packer, list(self._weights.shards(is_adapter))
        if self._lora and not self._merges:
            self.base = str(self.version)
        return self._packer, list(self._weights.shards(_all))

    def _state(self) -> dict[str, torch.Tensor]:
        values = self._values.state() if self._values else {}
        return titan_state.collect(self._model, self._optimizer, values, self._frozen_checksum())

    def _frozen_checksum(self) -> dict[str, torch.Tensor]:
        if self._lora is None:
            return {}
        if self._checksum is None:  # what is frozen never changes
            own = self._weights.checksum(lambda name: not is_adapter(name))
            self._checksum = torch.tensor([own], dtype=torch.int64, device=self._device)
            if self._settings.ranks > 1:
                dist.all_reduce(self._checksum)
        return {"checksum": self._checksum}

    def _over_ranks(self, totals: StepTotals) -> Figures:
        sums = dict(zip(totals.sums, self._sum_over_ranks(totals.sum_values()), strict=True))
        return sums, {name: self._max_over_ranks(value) for name, value in totals.maxima.items()}

    def _router_figures(self) -> dict[str, float]:
        load = titan_moe.take_load(self._model)
        if load is None:
            return {}
        return load_figures(np.reshape(self._sum_over_ranks(load.flatten().double()), load.shape))

    def _to_device(self, rows: Rows) -> dict[str, torch.Tensor]:
        names = COLUMNS + tuple(name for name in OPTIONAL_COLUMNS if getattr(rows, name) is not None)
        columns = {name: torch.from_numpy(getattr(rows, name)) for name in names}
        return {name: column.to(self._device) for name, column in columns.items()}

    def _prepared(self, share: Share) -> list[tuple[Counts, list[tuple[Rows, Known]]]]:
        """Of each mini-batch its counts and its micro-batches, with what must be known of them before the step."""
        built = [build_micro_batches(share.samples, part.batches, share.skipped) for part in share.mini_batches]
        flat = [rows for batches in built for rows in batches]
        of_rows = iter(self._values.targets(flat, self._before_step) if self._values else [Known() for _ in flat])
        parts = [
            (part.counts, [(rows, next(of_rows)) for rows in batches])
            for part, batches in zip(share.mini_batches, built, strict=True)
        ]
        if self._loss.needs_start:  # the first update's own pass is at the step's start; the others' are not
            for rows, known in (each for _, batches in parts[1:] for each in batches):
                known["start_logprobs"] = self._logprobs_now(rows)
        return parts

    def _logprobs_now(self, rows: Rows) -> torch.Tensor:
        with torch.no_grad(), self._in_context():
            return forward(self._model, self._to_device(rows), self._wanted).logprobs

    def _forward_backward(self, rows: Rows, counts: Counts, known: Known, update: int) -> LossTerms:
        """One micro-batch. `known` holds what is known of it beside its rows, and keeps what later updates want."""
        columns = self._to_device(rows)
        with self._in_context():
            inputs = self._inputs(columns, rows.num_segments, known, update)
            terms = self._loss(inputs, counts)
            terms.loss.backward()
        if self._settings.updates_per_batch > 1:
            known.setdefault("start_logprobs", inputs.logprobs.detach())
        return terms

    def _inputs(self, columns: dict[str, torch.Tensor], num_segments: int, known: Known, update: int) -> LossInputs:
        entropy = "gradient" if self._loss.settings.entropy_weight else "figure" if self._loss.needs_entropy else "none"
        frozen = self._frozen_scores(columns)  # first: values are those of the last pass through the model
        found = forward(self._model, columns, replace(self._wanted, entropy=entropy))
        ages = (self.version.step + update - columns["steps"]).clamp(min=0) * (columns["steps"] >= 0)
        given = {"advantages": columns["advantages"]} | frozen | known
        return LossInputs(
            logprobs=found.logprobs,
            entropy=found.entropy,
            behaviour_logprobs=columns["behaviour_logprobs"],
            anchor_logprobs=columns["behaviour_logprobs"],
            mask=columns["mask"],
            segments=columns["segments"],
            num_segments=num_segments,
            ages=ages,
            values=self._values.values() if self._values else None,
            **given,
        )

    def _before_step(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """float32 [B, L] each: values and log-probabilities before the step."""
        assert self._values is not None
        with torch.no_grad(), self._in_context():
            logprobs = forward(self._model, self._to_device(rows), self._wanted).logprobs
            return self._values.values().cpu().numpy(), logprobs.cpu().numpy()

    def _apply_gradients(self, loss: float, share: Share, blamed: tuple[int, int], update: int) -> float:
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
            self._copy_out.wait()
            self._optimizer.step()
            if self._values:
                self._values.step(self._last_lr)
        self._optimizer.zero_grad()
        if not finite:
            if self._values:
                self._values.drop()
            sample, step = self._blamed_on_any_rank(blamed), (self.version.step, update)
            raise NonFiniteError(not_finite(step, loss, float(norm), share.group_indices, sample))
        return float(norm)

    def _blamed_on_any_rank(self, blamed: tuple[int, int]) -> tuple[int, int]:
        """One rank's sample for all of them, so that every rank's error says the same."""
        shift = 2**20  # samples of a group stay below it; float64 holds the pair exactly
        code = self._most_over_ranks(blamed[0] * shift + blamed[1])
        return divmod(code, shift) if code >= 0 else NOBODY

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


def _all(_name: str) -> bool:
    return True
