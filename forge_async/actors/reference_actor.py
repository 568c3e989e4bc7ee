"""The reference service: frozen models on a mesh of their own, which score samples while they wait to be trained on.

Rollout workers call its first rank, which calls all of them for one set of samples after the other: models that are
sharded over ranks need every rank in each pass, in the same order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from forge_async.actors.forge_actor import ActorHandle, ForgeActor, concurrent_endpoint
from forge_async.core.errors import LearnerError
from forge_async.core.records import Samples
from forge_async.learner.frozen import frozen_folders
from forge_async.learner.settings import LearnerSettings, ReferenceSettings

if TYPE_CHECKING:
    from forge_async.backends.titan_frozen import TitanReference
    from forge_async.config import Config

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePlan:
    """All that a rank of the service is built from."""

    model_folder: str
    """Of the model that learns."""
    folders: Mapping[str, str]
    """Hugging Face folders of the frozen models, by the field of Samples that each gives."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    """The learner's: dtype and limits of micro-batches."""
    temperature: float = 1.0
    """The sampler's."""

    @classmethod
    def of(cls, config: Config, model_folder: str) -> ReferencePlan:
        """What a run's configuration asks for."""
        folders = frozen_folders(config.objective, Path(model_folder))
        return cls(
            model_folder=model_folder,
            folders={name: str(folder.absolute()) for name, folder in folders.items()},
            reference=config.reference,
            learner=config.learner,
            temperature=config.sampling.temperature,
        )


class ReferenceActor(ForgeActor):
    """Rank of an SPMD mesh. Torch work runs on one thread, so that the actor stays free to take calls meanwhile."""

    def __init__(self, plan: ReferencePlan) -> None:
        self._plan = plan
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reference")
        self._models: TitanReference | None = None
        self._ranks: ActorHandle | None = None
        self._turn = asyncio.Lock()

    async def setup(self) -> None:
        await self._run(self._build)

    async def teardown(self) -> None:
        if self._models is not None:
            await self._run(self._models.close)

    @concurrent_endpoint
    async def connect(self, ranks: ActorHandle) -> None:
        """Learn who all the ranks are. Called on the first, before `score`, where there are several."""
        self._ranks = ranks

    @concurrent_endpoint
    async def score(self, samples: Samples) -> dict[str, np.ndarray]:
        """By field of Samples float32 [T]: the log-probabilities of the tokens that are trained on, 0 elsewhere.

        Called on the first rank.
        """
        if self._plan.reference.ranks == 1:
            return await self._score(samples)
        if self._ranks is None:
            raise LearnerError("The reference service is not connected to its ranks.")
        async with self._turn:
            parts = await self._ranks.score_share.call_ranks(samples, timeout_s=self._plan.reference.timeout_s)
        return {name: np.stack([part[name] for part in parts]).sum(axis=0) for name in parts[0]}

    @concurrent_endpoint
    async def score_share(self, samples: Samples) -> dict[str, np.ndarray]:
        """The same for this rank's share of the samples, 0 elsewhere. Called on all ranks together."""
        return await self._score(samples)

    async def _score(self, samples: Samples) -> dict[str, np.ndarray]:
        models = self._models
        if models is None:
            raise LearnerError("The reference service is not set up.")
        return await self._run(lambda: models.score(samples))

    def _build(self) -> None:
        from forge_async.backends.titan_frozen import TitanReference

        plan = self._plan
        self._models = TitanReference(
            {name: Path(folder) for name, folder in plan.folders.items()},
            policy_folder=Path(plan.model_folder),
            ranks=plan.reference.ranks,
            learner=plan.learner,
            temperature=plan.temperature,
        )

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
