"""The models that are only read: the reference and the teacher, by the field of LossInputs that they give."""

from __future__ import annotations

from pathlib import Path

from forge_async.learner.settings import ObjectiveSettings


def frozen_folders(objective: ObjectiveSettings, model_folder: Path) -> dict[str, Path]:
    """The Hugging Face folder of each; the reference is the initial model, in `model_folder`."""
    folders = {"reference_logprobs": model_folder} if objective.kl_weight > 0 else {}
    if objective.teacher:
        folders["teacher_logprobs"] = Path(objective.teacher)
    return folders
