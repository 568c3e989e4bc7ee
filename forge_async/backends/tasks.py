"""What `task.*`, `prompts` and `reward` name, put together: a prompt source, a renderer, reward functions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forge_async.backends.hf_renderer import HfRenderer
from forge_async.core.errors import ConfigError
from forge_async.core.records import PromptId
from forge_async.prompt.ports import PromptSource, Renderer
from forge_async.prompt.settings import TaskSettings

NUM_PROBED_PROMPTS = 16
"""Prompts that are rendered to see whether they fit."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""One of these holds the vocabulary. Where all are missing, transformers makes an empty tokenizer up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTask:
    """A task, ready to give prompts."""

    source: PromptSource
    renderer: Renderer
    reward: str
    """Reference of the reward function."""
    exact: str
    """Reference of the exact match for evaluation; "" where the reward function itself is used."""


def open_task(
    model_folder: str, task: TaskSettings, *, prompts: str, reward: str, seed: int, demonstrations: bool = False
) -> OpenTask:
    """Open the prompts and name the rewards of a run.

    Args:
        model_folder: whose tokenizer and chat template render the prompts.
        task: settings.
        prompts: a .jsonl file, or "" for the task's own prompts.
        reward: reference of the user's reward function, or "" for the task's own.
        seed: the run's.
        demonstrations: give the prompts that are kept for demonstrations.

    Raises ConfigError when they cannot be used together.
    """
    renderer = HfRenderer(model_folder, chat=task.chat)
    if prompts:
        from forge_async.prompt.sources import JsonlSource

        if not reward:
            raise ConfigError(f"prompts={prompts} needs a reward; give reward=file.py:function.")
        source = JsonlSource(
            prompts,
            renderer,
            seed=seed,
            held_out_fraction=task.held_out_fraction,
            system=task.system,
            demonstrations=demonstrations,
        )
        return OpenTask(source=source, renderer=renderer, reward=reward, exact="")
    from forge_async.backends.reasoning_gym_task import EXACT, ReasoningGymSource

    source = ReasoningGymSource(
        task.name,
        renderer,
        options=task.options,
        seed=seed,
        num_prompts=task.num_prompts,
        held_out_fraction=task.held_out_fraction,
        demonstration_fraction=task.demonstration_fraction,
        demonstrations=demonstrations,
        system=task.system,
    )
    return OpenTask(source=source, renderer=renderer, reward=reward or source.reward, exact="" if reward else EXACT)


def check_tokenizer_files(model_folder: Path) -> None:
    """Raise ConfigError when a folder has no tokenizer at all."""
    if not any((model_folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path={model_folder} has no tokenizer ({' or '.join(TOKENIZER_FILES)}); put it there.")


def check_prompts_fit(task: OpenTask, max_new_tokens: int, max_model_tokens: int) -> int:
    """Render some prompts; returns the tokens of the longest.

    Raises ConfigError when one of them and its completion are longer than the engine takes.
    """
    ids = (
        PromptId(source=task.source.name, epoch=0, index=index)
        for index in range(min(NUM_PROBED_PROMPTS, len(task.source)))
    )
    longest = max(len(task.source.prompt(id).token_ids) for id in ids)
    if longest + max_new_tokens > max_model_tokens:
        raise ConfigError(
            f"A prompt of {longest} tokens and sampling.max_new_tokens={max_new_tokens} do not fit "
            f"policy.max_model_tokens={max_model_tokens}; "
            f"use policy.max_model_tokens={-(-(longest + max_new_tokens) // 32) * 32} or so."
        )
    return longest
