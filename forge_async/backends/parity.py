"""Does the learner compute what transformers computes? Both read a folder; their logits on a few texts are compared."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge_async.backends.hf_renderer import HfRenderer
from forge_async.backends.only_rank import be_the_only_rank
from forge_async.core.packages import require
from forge_async.learner.settings import LearnerSettings, OptimizerSettings

if TYPE_CHECKING:
    import torch

    from forge_async.backends.titan_learner import TitanLearner

TOLERANCE = 1e-4
"""Largest difference in logits, in float32, that passes. SmolLM2's logits reach 35, where float32 has 4e-6 steps."""
TEXTS = (
    "What is 17 + 25?",
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "3 + 4 = 7. 5 - 9 = -4. 12 * 12 = 144. The next one is 8 + 8 = 16, and then there is one more.",
)
"""Printable ASCII, which the character tokenizer of the tiny model can express too."""


def probe_ids(folder: Path, max_tokens: int) -> np.ndarray:
    """int32 [T], the text of the probe that travels with versions, as a model's tokenizer has it.

    Raises ConfigError when the folder has no tokenizer.
    """
    return HfRenderer(folder).render(" ".join(TEXTS))[:max_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What the comparison found."""

    logits_diff_max: float
    """Largest difference of two logits."""
    logits_max: float
    """Largest logit, as the scale of that difference."""
    num_tokens: int
    """Tokens that were compared."""

    @property
    def holds(self) -> bool:
        """Whether the difference passes; not a number does not."""
        return self.logits_diff_max <= TOLERANCE


def compare(folder: Path, texts: Sequence[str] = TEXTS) -> Parity:
    """Compare the learner's logits with those of transformers, in float32 on this process's device.

    Args:
        folder: Hugging Face folder of a model that the learner supports.
        texts: each is rendered as a prompt, as a chat where the model has a template.

    Raises ConfigError when the folder cannot be used, MissingPackageError when a package is missing.
    """
    for module in ("torch", "torchtitan", "transformers", "safetensors"):
        require(module, feature="Comparing the learner with transformers")
    renderer = HfRenderer(folder)
    prompts = [renderer.render(text) for text in texts]
    theirs = _transformers_logits(folder, prompts)
    ours = _learner_logits(folder, prompts)
    differences = [(a - b).abs().max() for a, b in zip(ours, theirs, strict=True)]
    return Parity(
        logits_diff_max=max(map(float, differences)) if all(map(_finite, differences)) else float("nan"),
        logits_max=max(float(logits.abs().max()) for logits in theirs),
        num_tokens=sum(map(len, prompts)),
    )


def _finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite())


def _transformers_logits(folder: Path, prompts: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """float32 [T, V] of each prompt."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return [model(torch.from_numpy(ids).long()[None]).logits[0].float() for ids in prompts]


def _learner_logits(folder: Path, prompts: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """float32 [T, V] of each prompt, by a learner of one rank built as a run builds it."""
    be_the_only_rank()
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import supervised_loss

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # random numbers on a CPU mesh: none are drawn
        learner = TitanLearner(
            folder,
            loss=supervised_loss(),
            learner=LearnerSettings(),
            optimizer=OptimizerSettings(warmup_steps=0),
            total_steps=1,
            seed=0,
        )
    try:
        return [_watch_logits(learner, ids) for ids in prompts]
    finally:
        learner.close()


def _watch_logits(learner: TitanLearner, ids: np.ndarray) -> torch.Tensor:
    """float32 [T, V], what the model gives on the learner's own way to log-probabilities, chunk by chunk."""
    import torch

    seen: list[torch.Tensor] = []
    head = learner._model.lm_head
    project = head.forward

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits = project(hidden)
        seen.append(logits.detach().flatten(0, -2).float().cpu())
        return logits

    head.forward = watched
    try:
        learner.score([ids])
    finally:
        head.forward = project
    return torch.cat(seen)[: len(ids)]
