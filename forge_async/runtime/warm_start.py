"""The default run's starting point: a tiny model, taught a little of its task by demonstrations, made once and kept.

The demonstrations come from a share of the task's prompts that neither training by reward nor evaluation ever sees.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from forge_async.backends.tiny_model import TinyMixture, TinyShape, to_json
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.core.paths import cache_dir, new_folder

TIMEOUT_S = 900.0
"""Longest time that making a warm start may take; on two cores it takes about one minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """How a task's starting point is made."""

    shape: TinyShape
    steps: int
    """Supervised steps: few, so that most is left for reinforcement."""
    lr: float
    min_lr_factor: float
    num_prompts: int
    """Distinct demonstrations; 0: all that there are."""
    batch_samples: int = 64
    options: dict[str, int] = field(default_factory=dict)
    """Options of the task's data set for its demonstrations, where they are to be more varied than the task."""


WARM_STARTS: dict[str, WarmStart] = {
    "spell": WarmStart(
        shape=TinyShape(dim=128, layers=2, heads=4, kv_heads=2, ffn=384),
        steps=130,
        lr=1e-3,
        min_lr_factor=0.85,
        num_prompts=1000,
    ),
    "sum": WarmStart(
        shape=TinyShape(dim=64, layers=2, heads=2, kv_heads=1, ffn=192),
        steps=600,
        lr=5e-3,
        min_lr_factor=0.05,
        num_prompts=0,
        batch_samples=128,
        # There are 200 sums of two digits. Of the 75 or so that may be shown, a model learns by heart what it is shown,
        # and nothing of the others; half of these demonstrations are of the 4,000 sums of three.
        options={"max_terms": 3},
    ),
}


def find_warm_start(config: Config) -> Path | None:
    """The folder of the task's warm start if the cache has it. Raises ConfigError for a task without one."""
    folder = _target(config) / "model"
    return folder if folder.exists() else None


def ensure_warm_start(config: Config, say: Callable[[str], None] = print) -> Path:
    """The folder of the task's warm start; made first when the cache has none.

    Raises ConfigError for a task without one.
    """
    target = _target(config)
    if not target.exists():
        say(f"making the warm start in {target} (once, about a minute)")
        with new_folder(target) as partial:
            _make(config, _recipe(config), partial)
    return target / "model"


def _recipe(config: Config) -> WarmStart:
    """The task's; as a mixture, each expert has a third of the dense width, and a token takes two of eight."""
    recipe = WARM_STARTS[config.task.name]
    if config.model.tiny == "dense":
        return recipe
    mixture = TinyMixture(
        **asdict(recipe.shape), experts=8, experts_per_token=2, expert_ffn=max(32, recipe.shape.ffn // 96 * 32)
    )
    return replace(recipe, shape=mixture)


def _target(config: Config) -> Path:
    if config.task.name not in WARM_STARTS:
        raise ConfigError(
            f"task.name={config.task.name} has no warm start of its own (there is one for {', '.join(WARM_STARTS)}); "
            "give model.path."
        )
    return cache_dir() / "warm-start" / f"{config.task.name}-{_key(config, _recipe(config))}"


def _key(config: Config, recipe: WarmStart) -> str:
    """What the warm start depends on, as a short hash."""
    made_of = asdict(recipe)
    if not recipe.options:  # as the key was before there were any
        del made_of["options"]
    parts = {"recipe": made_of, "task": asdict(config.task)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _make(config: Config, recipe: WarmStart, folder: Path) -> None:
    start = str(folder / "random")
    _call([sys.executable, "-m", "forge_async.backends.tiny_model", start, to_json(recipe.shape)], folder)
    _call([sys.executable, "-m", "forge_async.apps.sft", *_words(config, recipe, folder)], folder)


def _words(config: Config, recipe: WarmStart, folder: Path) -> list[str]:
    """What `apps.sft` is told: from `folder`/random to `folder`/model."""
    task = asdict(config.task)
    task["options"] = recipe.options | task["options"]
    return [
        f"model.path={folder / 'random'}",
        f"sft.output={folder / 'model'}",
        f"sft.steps={recipe.steps}",
        f"sft.lr={recipe.lr}",
        f"sft.min_lr_factor={recipe.min_lr_factor}",
        f"sft.num_prompts={recipe.num_prompts}",
        f"sft.batch_samples={recipe.batch_samples}",
        *(f"task.{name}={json.dumps(value)}" for name, value in task.items() if value not in ("", {})),
    ]


def _call(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"the warm start could not be made: {cause}")
