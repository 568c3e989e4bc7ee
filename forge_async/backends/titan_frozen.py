"""Models that are only read, the reference and the teacher: on the learner's mesh, or in a service of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_async.backends.titan_build import check_same_tokens, load_model
from forge_async.backends.titan_forward import forward
from forge_async.backends.titan_world import World, join_world, leave_world

# isort: split
import torch

from forge_async.core.errors import LearnerError
from forge_async.core.records import Samples
from forge_async.learner.batch import lay_out_samples
from forge_async.learner.layout import Layout
from forge_async.learner.rows import build_micro_batches, lay_back
from forge_async.learner.settings import LearnerSettings
from forge_async.learner.token_scores import Wanted

READ_COLUMNS = ("token_ids", "positions", "targets", "mask", "kept_set")
"""What a model is given to read; not the experts that the policy chose: another model's distribution is what it would
give by its own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """One of them."""

    model: Any
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What its forward pass runs in."""


class FrozenScores(Protocol):
    """Where a micro-batch's log-probabilities of frozen models come from."""

    def __call__(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """By field of LossInputs float32 [B, L]; collective where models are sharded.

        Args:
            columns: of the micro-batch, as `titan_forward.forward` takes them.
        """
        ...


class OwnModels:
    """Computed here, by models that lie on this mesh."""

    def __init__(self, models: Mapping[str, Frozen], wanted: Wanted) -> None:
        self._models, self._wanted = models, wanted

    def __call__(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        read = {name: columns[name] for name in READ_COLUMNS if name in columns}
        found = {}
        for name, frozen in self._models.items():
            with torch.no_grad(), frozen.during():
                found[name] = forward(frozen.model, read, self._wanted).logprobs
        return found


class CameWithSamples:
    """Computed by the reference service before the samples were handed over."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def __call__(self, columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        missing = [name for name in self._names if name not in columns]
        if missing and bool(columns["mask"].any()):
            raise LearnerError(
                f"The samples came without {missing[0]}, which reference.placement=service adds to them; score them "
                "with a ReferenceActor before training, or use reference.placement=learner."
            )
        return {name: columns.get(name, columns["behaviour_logprobs"]) for name in self._names}


def load_frozen(
    folders: Mapping[str, Path], settings: LearnerSettings, world: World, *, policy_folder: Path
) -> dict[str, Frozen]:
    """Load each folder's model, sharded over the world as `settings` say.

    Raises ConfigError for a folder that cannot be read, or whose tokens are others than those of `policy_folder`.
    """
    found = {}
    for name, folder in folders.items():
        if folder != policy_folder:
            check_same_tokens(policy_folder, folder)
        model, _ = load_model(folder, settings, world.parallelism, world.dims, world.device)
        found[name] = Frozen(model=model.eval().requires_grad_(False))
    return found


class TitanReference:
    """A rank of the reference service: frozen models, and the log-probabilities that they give to samples."""

    def __init__(
        self,
        folders: Mapping[str, Path],
        *,
        policy_folder: Path,
        ranks: int,
        learner: LearnerSettings,
        temperature: float,
    ) -> None:
        """Load the models on this rank's device.

        Args:
            folders: Hugging Face folders, by the field of Samples that each gives.
            policy_folder: of the model that learns, with the same tokens.
            ranks: of the service; parameters are sharded over them.
            learner: the learner's settings: the dtype, the limits of micro-batches, whether models are compiled.
            temperature: the sampler's.
        """
        self._settings = replace(
            learner, ranks=ranks, tensor_parallel=1, expert_parallel=1, activation_checkpointing="none"
        )
        self._layout = replace(Layout.of(learner), mini_batches=1)
        self._world = join_world(self._settings, 0, key="reference.ranks")
        wanted = Wanted(temperature=temperature, chunk_tokens=learner.logit_chunk_tokens)
        models = load_frozen(folders, self._settings, self._world, policy_folder=policy_folder)
        self._names, self._scores = tuple(models), OwnModels(models, wanted)

    def score(self, samples: Samples) -> dict[str, np.ndarray]:
        """By field of Samples float32 [T]: of the tokens of this rank's share, 0 elsewhere. Collective."""
        ranks, skipped = lay_out_samples(samples, self._layout, self._world.batch_ranks)
        laid = ranks[self._world.batch_rank]
        found = {name: np.zeros(samples.num_tokens, np.float32) for name in self._names}
        for batch, rows in zip(laid, build_micro_batches(samples, laid, skipped), strict=True):
            arrays = {name: each for name in READ_COLUMNS if (each := getattr(rows, name)) is not None}
            columns = {name: torch.from_numpy(each).to(self._world.device) for name, each in arrays.items()}
            with self._world.in_context():
                scores = self._scores(columns)
            for name, logprobs in scores.items():
                lay_back(logprobs.cpu().numpy(), samples, batch, found[name], skipped)
        return found

    def close(self) -> None:
        """Leave the process group."""
        leave_world()
