"""The composition: which room's settings stand under which section, every key by its name, and the whole Config."""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from forge_async.config.job import JobSettings
from forge_async.config.root import RootSettings
from forge_async.learner.settings import (
    CorrectionSettings,
    LearnerSettings,
    LoraSettings,
    ModelSettings,
    ObjectiveSettings,
    OptimizerSettings,
    ReferenceSettings,
)
from forge_async.observe.settings import ObserveSettings
from forge_async.pipeline.settings import CheckpointSettings, EvalSettings, RunSettings, SftSettings
from forge_async.policy.settings import PolicySettings, SamplingSettings
from forge_async.policy.swap import swap_mode
from forge_async.prompt.settings import TaskSettings
from forge_async.replay.settings import AsyncSettings
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.settings import RolloutSettings
from forge_async.weights.settings import WeightsSettings

MOST_PROBE_TOKENS = 64
"""Enough to tell a wrong version, and few enough to cost an engine step no more than a prompt does."""
MOST_ADAPTERS = 8
"""Adapters that an engine is given room for, whatever the bound on age: each takes memory, used or not."""

SECTIONS: dict[str, type] = {
    "": RootSettings,
    "run": RunSettings,
    "model": ModelSettings,
    "task": TaskSettings,
    "sampling": SamplingSettings,
    "optimizer": OptimizerSettings,
    "objective": ObjectiveSettings,
    "reference": ReferenceSettings,
    "advantage": AdvantageSettings,
    "async": AsyncSettings,
    "correction": CorrectionSettings,
    "learner": LearnerSettings,
    "learner.lora": LoraSettings,
    "policy": PolicySettings,
    "weights": WeightsSettings,
    "rollout": RolloutSettings,
    "eval": EvalSettings,
    "checkpoint": CheckpointSettings,
    "sft": SftSettings,
    "job": JobSettings,
    "observe": ObserveSettings,
}
"""Section name -> the class that owns its keys; the section "" holds the keys without a prefix."""

TITLES: dict[str, str] = {
    "": "the run as a whole",
    "run": "the run's directory, display and deadlines",
    "model": "the model to train",
    "task": "where prompts come from",
    "sampling": "how completions are sampled",
    "optimizer": "AdamW and its schedule",
    "objective": "the loss",
    "reference": "where reference and teacher are",
    "advantage": "rewards to advantages",
    "async": "the dials of asynchrony",
    "correction": "the numbers of async.correction",
    "learner": "the learner's processes",
    "learner.lora": "adapters in place of the whole model",
    "policy": "the engines that generate",
    "weights": "how weights travel",
    "rollout": "rollout and reward workers",
    "eval": "evaluation",
    "checkpoint": "checkpoints",
    "sft": "supervised fine-tuning (apps.sft only)",
    "job": "where processes are started",
    "observe": "what a run writes about itself",
}
"""Section name -> its heading in `--help` and in docs/configuration.md."""

SYNONYMS: dict[str, str] = {
    "learning_rate": "optimizer.lr",
    "batch_size": "groups_per_step",
    "num_generations": "group_size",
    "max_steps": "steps",
    "max_tokens": "sampling.max_new_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "output_dir": "run.dir",
    "max_policy_age": "async.max_staleness",
}
"""What other trainers call a key -> our key, for the message about an unknown one."""


def attribute(section: str) -> str:
    """Name of the Config attribute that holds `section`: `async` is a keyword, "" and what has a dot are no names."""
    return {"": "root", "async": "asynchrony", "learner.lora": "lora"}.get(section, section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of the configuration, as its room declared it."""

    name: str
    """Dotted name, such as `async.max_staleness`."""
    section: str
    """Section name, "" for keys without a prefix."""
    field: str
    """Name of the dataclass field."""
    type: Any
    """Type hint of the field: str, int, float, bool, int | str, list[str], list[int], or a dict of plain values."""
    default: Any
    """Value when the user says nothing."""
    meta: Mapping[str, Any]
    """What `core.settings.setting` recorded: doc, unit, low, high, choices, words."""

    @property
    def number(self) -> Any:
        """The type, or that of the number where words are allowed beside it."""
        return typing.get_args(self.type)[0] if self.meta["words"] else self.type

    @property
    def is_mapping(self) -> bool:
        """Whether entries may be set one by one, as in `task.options.max_terms=3`."""
        return typing.get_origin(self.type) is dict


def _keys() -> Iterable[Key]:
    for section, cls in SECTIONS.items():
        hints, defaults = typing.get_type_hints(cls), cls()
        for item in dataclasses.fields(cls):
            yield Key(
                name=f"{section}.{item.name}" if section else item.name,
                section=section,
                field=item.name,
                type=hints[item.name],
                default=getattr(defaults, item.name),
                meta=item.metadata,
            )


KEYS: dict[str, Key] = {key.name: key for key in _keys()}
"""Every key by its dotted name, in the order of `--help`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole configuration: one frozen Settings instance for each section. `Config()` is the default run."""

    root: RootSettings = field(default_factory=RootSettings)
    """Keys without a prefix."""
    run: RunSettings = field(default_factory=RunSettings)
    """Keys under `run`."""
    model: ModelSettings = field(default_factory=ModelSettings)
    """Keys under `model`."""
    task: TaskSettings = field(default_factory=TaskSettings)
    """Keys under `task`."""
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    """Keys under `sampling`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """Keys under `optimizer`."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """Keys under `objective`."""
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    """Keys under `reference`."""
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    """Keys under `advantage`."""
    asynchrony: AsyncSettings = field(default_factory=AsyncSettings)
    """Keys under `async`, which is a keyword of Python."""
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    """Keys under `correction`."""
    learner: LearnerSettings = field(default_factory=LearnerSettings)
    """Keys under `learner`."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    """Keys under `learner.lora`."""
    policy: PolicySettings = field(default_factory=PolicySettings)
    """Keys under `policy`."""
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    """Keys under `weights`."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Keys under `rollout`."""
    eval: EvalSettings = field(default_factory=EvalSettings)
    """Keys under `eval`."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    """Keys under `checkpoint`."""
    sft: SftSettings = field(default_factory=SftSettings)
    """Keys under `sft`."""
    job: JobSettings = field(default_factory=JobSettings)
    """Keys under `job`."""
    observe: ObserveSettings = field(default_factory=ObserveSettings)
    """Keys under `observe`."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Build a Config from dotted keys; keys that `values` lacks keep their defaults. Nothing is checked."""
        return cls().replace(values)

    def value(self, key: str) -> Any:
        """Return the value of a dotted key; KeyError when there is no such key."""
        known = KEYS[key]
        return getattr(getattr(self, attribute(known.section)), known.field)

    def replace(self, values: Mapping[str, Any]) -> Config:
        """Return a copy with the given dotted keys changed. Nothing is checked."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(attribute(KEYS[name].section), {})[KEYS[name].field] = value
        return dataclasses.replace(
            self, **{name: dataclasses.replace(getattr(self, name), **fields) for name, fields in changes.items()}
        )

    def whole_objective(self) -> ObjectiveSettings:
        """The objective's settings with the length limit filled in where it stands for a constant."""
        tokens = self.objective.constant_tokens or self.sampling.max_new_tokens
        return dataclasses.replace(self.objective, constant_tokens=tokens)

    def travelling_lora(self) -> LoraSettings | None:
        """The adapters that are published by themselves; None without adapters, or when they travel merged."""
        return self.lora if self.lora.rank and not self.weights.merge_adapters else None

    def adapters_held(self) -> int:
        """How many adapters an engine holds at once.

        Only in a drain do requests end with the one that they began with. By the bound on age those are S + 1 versions
        at most, and the next one comes beside them.
        """
        if self.travelling_lora() is None or not swap_mode(self.asynchrony.swap).drains:
            return 1
        bound = self.asynchrony.highest_staleness
        return MOST_ADAPTERS if bound is None else min(bound + 2, MOST_ADAPTERS)

    def probe_tokens(self) -> int:
        """Longest probe that travels with each version, in tokens; 0 where every engine can be read back."""
        needs_one = self.policy.quantize != "none" and self.weights.verify != "none"
        return min(MOST_PROBE_TOKENS, self.policy.max_model_tokens - 1) if needs_one else 0

    def to_yaml(self) -> str:
        """Return YAML that names every key with its value; loading it again gives an equal Config."""
        tree: dict[str, Any] = {}
        for key in KEYS.values():
            branch = tree
            for part in filter(None, key.section.split(".")):
                branch = branch.setdefault(part, {})
            branch[key.field] = _literal(self.value(key.name))
        return OmegaConf.to_yaml(OmegaConf.create(tree))


def _literal(value: Any) -> Any:
    """Escape what OmegaConf would take for an interpolation: `${` and the backslashes before it."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {name: _literal(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in value]
    return value


def nearest_keys(name: str) -> list[str]:
    """Return the known keys that a user who wrote `name` most likely meant, best first; empty when none is near.

    A near miss of the whole name comes first, then the same last word under another section (`max_staleness`,
    `learner.lr`), then a wider miss of the whole name or of the last word.
    """
    tail = name.rpartition(".")[2]
    if tail in SYNONYMS:
        return [SYNONYMS[tail]]
    same_tail = [key.name for key in KEYS.values() if key.field == tail]
    near_tail = difflib.get_close_matches(tail, {key.field for key in KEYS.values()}, n=1, cutoff=0.75)
    return (
        difflib.get_close_matches(name, KEYS, n=1, cutoff=0.9)
        or sorted(same_tail, key=lambda key: -difflib.SequenceMatcher(None, name, key).ratio())[:3]
        or difflib.get_close_matches(name, KEYS, n=1, cutoff=0.65)
        or [key.name for key in KEYS.values() if key.field in near_tail][:3]
    )
