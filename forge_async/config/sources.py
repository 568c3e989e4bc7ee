"""What the user wrote, as layers of dotted keys: YAML files, shipped configurations, and `key=value` words.

A value is read with the type of its key in mind. A key that holds text takes the text as it stands, so that
`task.chat=on` is the word "on" and `job.time_limit=01:30:00` is no number, as YAML would have it.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forge_async.config.schema import KEYS, SECTIONS, Key, nearest_keys
from forge_async.core.errors import ConfigError

_TEXT, _NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is faster, where PyYAML was built with it
_DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_DEPTH = 4  # an alias may hold itself; no key is deeper than two


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value that the user gave."""

    key: str
    """Dotted name: a known key, or one entry of a key that is a mapping (`task.options.max_terms`)."""
    value: Any
    """Plain value; interpolations are not resolved yet."""
    where: str
    """Beginning of a message about this entry: "FILE, line 3: ", or "" for the command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A key and its YAML node, before the value is made."""

    key: str
    node: yaml.Node
    where: str


def file_layer(path: Path) -> list[Entry]:
    """Read a configuration file.

    Raises:
        ConfigError: the file cannot be read, is no YAML mapping, or holds a key that is unknown or given twice.
    """
    node = _compose(_read(path), str(path))
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} holds no keys; write it as YAML lines such as `steps: 50`.")
    written: dict[str, _Written] = {}
    for item in _flatten(node, "", str(path), 0):
        if item.key in written:
            raise ConfigError(f"{item.where}{item.key} is given twice in this file; keep one of them.")
        written[item.key] = item
    return _entries(list(written.values()))


def override_layer(words: Sequence[str]) -> list[Entry]:
    """Read `key=value` words of a command line; a later word wins over an earlier one.

    Raises:
        ConfigError: a word without `=`, an unknown key, or a value that is not YAML where the key needs it.
    """
    return _entries([_override(word) for word in words])


def shipped_names() -> list[str]:
    """Names that `--config` takes for the configurations in this package."""
    folder = resources.files("forge_async.config") / "shipped"
    return sorted(item.name.removesuffix(".yaml") for item in folder.iterdir() if item.name.endswith(".yaml"))


def find_config(name: str | Path) -> Path:
    """Return the file that `--config NAME` means: a shipped configuration by its bare name, else a path."""
    shipped = Path(str(resources.files("forge_async.config") / "shipped" / f"{name}.yaml"))
    if isinstance(name, str) and "/" not in name and _is_file(shipped):
        return shipped
    path = Path(name).expanduser()
    if _is_file(path):
        return path
    problem = "is no file" if os.path.lexists(path) else "was not found"
    raise ConfigError(f"--config {name} {problem}; give a YAML file or one of {', '.join(shipped_names())}.")


def show(value: Any) -> str:
    """Write a value as in an override, shortened for a message."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be looked into
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a YAML file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; give a YAML file.") from error


def _compose(text: str, name: str) -> yaml.Node | None:
    """Parse YAML into nodes; `name` is what the message calls it, a file or a whole `key=value` word."""
    try:
        return yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark, problem = error.problem_mark, error.problem or error.context
        line = f", line {mark.line + 1}" if mark and "\n" in text else ""
        raise ConfigError(f"{name}{line} is not YAML ({problem}); mend it, or put the value in quotes.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not YAML ({' '.join(str(error).split())}); mend it.") from error


def _flatten(node: yaml.MappingNode, prefix: str, path: str, depth: int) -> Iterator[_Written]:
    """Yield every known key below `node`; a section without keys yields nothing."""
    for name_node, value in node.value:
        name, where = f"{prefix}{name_node.value}", f"{path}, line {name_node.start_mark.line + 1}: "
        if isinstance(value, yaml.MappingNode) and name not in KEYS and value.value and depth < _DEPTH:
            yield from _flatten(value, f"{name}.", path, depth + 1)
        elif name in SECTIONS and (value.tag == _NULL or (isinstance(value, yaml.MappingNode) and not value.value)):
            continue
        else:
            known_key(name, value.value if isinstance(value, yaml.ScalarNode) else "...", where)
            yield _Written(key=name, node=value, where=where)


def _override(word: str) -> _Written:
    name, equals, text = word.partition("=")
    if not equals or not name:
        hint = f"; did you mean --config {word}?" if word in shipped_names() or _is_file(Path(word)) else "."
        raise ConfigError(f"{word} is no override: write key=value, such as steps=50{hint}")
    return _Written(key=name, node=_override_node(known_key(name, text, ""), word, text), where="")


def _override_node(key: Key, word: str, text: str) -> yaml.Node:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if key.type is str and not quoted:
        return yaml.ScalarNode(_TEXT, "" if text == "null" else text)
    node = _compose(text, word)
    return yaml.ScalarNode(_NULL, "") if node is None else node


def known_key(name: str, value: str, where: str) -> Key:
    """Return the key that `name` belongs to; ConfigError names the nearest key when there is none."""
    key = KEYS.get(name) or next((k for k in KEYS.values() if k.is_mapping and name.startswith(f"{k.name}.")), None)
    if key is not None:
        return key
    if name in SECTIONS:
        first = next(k.name for k in KEYS.values() if k.section == name)
        raise ConfigError(f"{where}{name}={show(value)}: {name} is a section, not a key; give one of its keys, "
                          f"such as {first}.")  # fmt: skip
    near = nearest_keys(name)
    remedy = f"did you mean {' or '.join(near)}?" if near else "--help lists every key."
    raise ConfigError(f"{where}Unknown key {name}={show(value)}; {remedy}")


def _entries(written: list[_Written]) -> list[Entry]:
    """Make the values: OmegaConf reads what the user wrote, after text was marked as text."""
    for item in written:
        _mark_text(item.node, KEYS[item.key].type if item.key in KEYS else None)
    pairs = [(yaml.ScalarNode(_TEXT, f"k{i}"), item.node) for i, item in enumerate(written)]
    text = yaml.serialize(yaml.MappingNode("tag:yaml.org,2002:map", pairs), Dumper=_DUMPER, allow_unicode=True)
    try:
        values = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_unreadable(written, error)) from error
    values = typing.cast(dict[str, Any], values)
    return [Entry(key=item.key, value=values[f"k{i}"], where=item.where) for i, item in enumerate(written)]


def _unreadable(written: list[_Written], error: Exception) -> str:
    """The sentence for a value that is YAML but not what OmegaConf takes: a tag, or a broken `${...}`."""
    place = re.match(r"k(\d+)", str(getattr(error, "full_key", None)))
    if place:
        item = written[int(place[1])]
        value = show(item.node.value) if isinstance(item.node, yaml.ScalarNode) else "..."
        return (f"{item.where}{item.key}={value} is no interpolation that can be read; write ${{key}} or "
                "${oc.env:NAME}, and \\${ for the bare characters.")  # fmt: skip
    name = written[0].where.partition(",")[0] or "The command line"
    return f"{name} holds a value that cannot be read ({' '.join(str(error).split())}); use plain YAML values."


def _mark_text(node: yaml.Node, hint: Any) -> None:
    """Turn the scalars that a text key holds into text; an empty one is the empty text."""
    if hint is str and isinstance(node, yaml.ScalarNode):
        node.value = "" if node.tag == _NULL else node.value
        node.tag, node.style = _TEXT, node.style or "'"
    elif typing.get_origin(hint) is list and isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _mark_text(item, typing.get_args(hint)[0])
