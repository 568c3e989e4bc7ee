"""From a command line to a checked Config: `load`. From files and overrides: `compose`. From one file: `from_file`."""

from __future__ import annotations

import copy
import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import (
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationValidationError,
    OmegaConfBaseException,
)

from forge_async.config.checks import check
from forge_async.config.presets import ALL_PRESETS
from forge_async.config.schema import KEYS, SECTIONS, Config, attribute
from forge_async.config.sources import Entry, file_layer, find_config, known_key, override_layer, show
from forge_async.core.errors import ConfigError
from forge_async.core.settings import check_ranges

_PATHS = ("run.dir", "model.path", "prompts", "reward", "objective.name", "objective.teacher")
"""Keys whose `~` is expanded: a shell leaves that of `run.dir=~/x` as it is."""


FIXED = ("seed", "groups_per_step", "prompts", "model.path", *(key for key in KEYS if key.startswith("task.")))
"""Keys that say which prompts there are, in which order, and for which model: those of a run that goes on stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for beside the configuration."""

    help: bool = False
    """Print `config.help.help_text()` and end; nothing else on the line was looked at."""
    dry_run: bool = False
    """Check everything that can be checked without starting, print placement, and end."""
    configs: tuple[str, ...] = ()
    """Files and names given with `--config`, in order."""
    overrides: tuple[str, ...] = ()
    """The `key=value` words, in order."""


def load(argv: Sequence[str]) -> tuple[Config, Options]:
    """Read what follows `python -m forge_async.apps.grpo`.

    Args:
        argv: `--config FILE_OR_NAME` (repeatable), `key=value`, `--help`, `--dry-run`, in any order.

    Returns:
        The checked Config and the Options; with `--help`, the default Config.

    Raises:
        ConfigError: the line, a file, a value or a combination cannot be used; the message is one sentence.
    """
    options = parse(argv)
    if options.help:
        return Config(), options
    config = compose(options.configs, options.overrides)
    if config.run.resume and config.run.dir:
        config = _continued(config, options)
    check(config)
    return config, options


def parse(argv: Sequence[str]) -> Options:
    """Sort the words of a command line; ConfigError for an option that does not exist."""
    words, configs, overrides, flags = iter(argv), [], [], set()
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--config":
            configs.append(value if equals else next(words, ""))
            if not configs[-1] or configs[-1].startswith("--"):
                raise ConfigError("--config needs a YAML file or the name of a shipped configuration after it.")
        elif word in ("--help", "-h", "--dry-run"):
            flags.add(word)
        elif word.startswith("-"):
            remedy = f"write keys without dashes: {word.lstrip('-')}" if equals else "--help lists what there is"
            raise ConfigError(f"Unknown option {word}; {remedy}{'.' if equals else ' to give.'}")
        else:
            overrides.append(word)
    return Options(
        help=bool(flags & {"--help", "-h"}),
        dry_run="--dry-run" in flags,
        configs=tuple(configs),
        overrides=tuple(overrides),
    )


def compose(configs: Sequence[str | Path] = (), overrides: Sequence[str] = ()) -> Config:
    """Merge defaults, configuration files and overrides, in this order; types and ranges are checked.

    Combinations and what lies on disk are not: `checks.check` does that, and `load` calls it.

    Args:
        configs: files (paths or words), or names of shipped configurations (words).
        overrides: words such as `steps=50` or `job.slurm_args=[--account=x]`.
    """
    layers = [file_layer(find_config(name)) for name in configs]
    layers.append(override_layer(overrides))
    tree, last = copy.deepcopy(_defaults()), {}
    for rank, layer in enumerate(layers):
        for entry in layer:
            _assign(tree, entry)
            last[entry.key] = rank, entry
    values = {name: _resolve(tree, name, last) for name in KEYS}
    values |= _preset(values, {name: rank for name, (rank, _) in last.items()})
    config = Config.of(values)
    for section in SECTIONS:
        check_ranges(getattr(config, attribute(section)), f"{section}." if section else "")
    return config


def _continued(asked: Config, options: Options) -> Config:
    """The configuration of a run that goes on: what it had, changed by what the command line says now."""
    stored = Path(asked.run.dir) / "config.yaml"
    if not stored.is_file():
        return asked  # refused by the checks
    before = from_file(stored)
    config = compose([stored, *options.configs], ["run.overwrite=false", *options.overrides])
    for key in FIXED:
        if config.value(key) != before.value(key):
            raise ConfigError(
                f"{key}={show(config.value(key))} cannot change in a run that goes on: {asked.run.dir} was begun with "
                f"{key}={show(before.value(key))}; leave {key} out, or begin a new run."
            )
    return config


def from_file(path: str | Path) -> Config:
    """Read one configuration file, such as the config.yaml of a run; combinations are not checked."""
    return compose([Path(path)])


@functools.cache
def _defaults() -> DictConfig:
    """The typed tree that values are assigned to; frozen dataclasses make read-only nodes, so that is lifted."""
    root = OmegaConf.structured(SECTIONS[""])
    OmegaConf.set_readonly(root, False)
    OmegaConf.set_struct(root, False)
    for name, cls in SECTIONS.items():
        if name:
            section = OmegaConf.structured(cls)
            OmegaConf.set_readonly(section, None)
            root[name] = section
    return root


def _assign(tree: DictConfig, entry: Entry) -> None:
    """Set one value; a whole list or mapping takes the place of the one before."""
    try:
        OmegaConf.update(tree, entry.key, entry.value, merge=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{entry.where}{_wrong_type(entry.key, entry.value)}") from error


def _wrong_type(name: str, value: Any) -> str:
    noun, example = _kind(name)
    if value is None:
        return f"{name} is given no value; give {noun}, such as {name}={example}."
    return f"{name}={show(value)} is not {noun}; write for example {name}={example}."


def _kind(name: str) -> tuple[str, str]:
    """What a value of this key is called in a message, and an example of one."""
    key = known_key(name, "", "")
    if key.number in (int, float, bool):
        noun = {int: "a whole number", float: "a number", bool: "true or false"}[key.number]
        return " or ".join((noun, *key.meta["words"])), show(key.default)
    if key.type is str:
        return "text", show(key.default or "some-text")
    if typing.get_origin(key.type) is list:
        return ("a list of whole numbers", "[1,8]") if key.type == list[int] else ("a list of texts", "[a,b]")
    return ("a mapping of plain values", "{a: 1}") if key.name == name else ("a plain value", "1")


def _resolve(tree: DictConfig, name: str, last: Mapping[str, tuple[int, Entry]]) -> Any:
    """Return the plain value of a key, interpolations resolved and `~` expanded."""
    try:
        value: Any = OmegaConf.select(tree, name)
        if isinstance(value, (DictConfig, ListConfig)):
            value = OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        entry = next(entry for key, (_, entry) in last.items() if key == name or key.startswith(f"{name}."))
        raise ConfigError(f"{entry.where}{name}={show(entry.value)} {_unresolved(name, error)}") from error
    return _finished(name, value)


def _finished(name: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}={value} is not a finite number; write for example {name}={KEYS[name].default}.")
    if isinstance(value, str) and KEYS[name].meta["words"] and re.fullmatch(r"-?\d+", value):
        return int(value)  # an interpolation gives text where a word may stand too
    if isinstance(value, str) and name in _PATHS and value.startswith("~/"):
        return str(Path(value).expanduser())
    return value


def _unresolved(name: str, error: OmegaConfBaseException) -> str:
    text = str(error).partition("\n")[0]
    variable = re.search(r"Environment variable '(.*?)' not found", text)
    if variable:
        return (f"needs the environment variable {variable[1]}, which is not set; set it, or give a default with "
                f"${{oc.env:{variable[1]},value}}.")  # fmt: skip
    key = re.search(r"key '(.*?)' not found", text)
    if isinstance(error, InterpolationKeyError) and key:
        return f"refers to {key[1]}, which is no key; refer to a key by its whole name, such as ${{optimizer.lr}}."
    if isinstance(error, InterpolationValidationError):
        value, (noun, example) = re.search(r"Value '(.*?)' of type", text), _kind(name)
        return (
            f"resolves to {value[1] if value else 'a value'}, which is not {noun}; give one such as {name}={example}."
        )
    if isinstance(error, InterpolationResolutionError) and "Recursive" in text:
        return "refers to itself; give one of the keys a value."
    return f"cannot be resolved ({text}); write ${{key}} or ${{oc.env:NAME}}."


def _preset(values: Mapping[str, Any], last: Mapping[str, int]) -> dict[str, Any]:
    """What words set for other keys, where the user did not give those in the same or a later file or command line."""
    return {
        name: value
        for key, presets in ALL_PRESETS.items()
        for name, value in presets.get(values[key], {}).items()
        if last.get(name, -1) < last.get(key, -1)
    }
