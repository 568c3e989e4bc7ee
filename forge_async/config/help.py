"""Explains every key: `--help`, and the tables of docs/configuration.md, both made from the rooms' settings.

`python -m forge_async.config.help docs/configuration.md` writes the tables of that file anew.
"""

from __future__ import annotations

import sys
import textwrap
import typing
from collections.abc import Sequence
from pathlib import Path

from forge_async.config.schema import KEYS, SECTIONS, TITLES, Key
from forge_async.config.sources import shipped_names

BEGIN, END = "<!-- keys: begin (python -m forge_async.config.help writes this) -->", "<!-- keys: end -->"

_USAGE = """\
usage: python -m forge_async.apps.{app} [--config FILE_OR_NAME ...] [key=value ...]
                                       [--dry-run] [--help]

  --config FILE_OR_NAME  a YAML file or a shipped configuration; several merge in order
                         {shipped}
  key=value              sets one key, after all files; a list: job.slurm_args=[--account=x];
                         another key's value: ${{optimizer.lr}}; the environment: ${{oc.env:HOME}}
  --dry-run              check all that can be checked without starting, print placement, end
  --help                 print this

Keys with their defaults:
"""


def help_text(app: str = "grpo", width: int = 96) -> str:
    """Return the text of `--help`.

    Args:
        app: module name under `forge_async.apps`.
        width: columns of the text.
    """
    shipped = textwrap.fill(f"shipped: {', '.join(shipped_names())}", width - 25).replace("\n", "\n" + " " * 25)
    parts = [_USAGE.format(app=app, shipped=shipped)]
    for section in SECTIONS:
        parts.append(f"{section + ': ' if section else ''}{TITLES[section]}")
        parts.extend(_help_entry(key, width) for key in _keys_of(section))
        parts.append("")
    return "\n".join(parts)


def markdown_tables() -> str:
    """Return the tables of docs/configuration.md, one a section."""
    parts = []
    for section in SECTIONS:
        parts.append(f"### {f'`{section}`: ' if section else ''}{TITLES[section]}\n")
        parts.append("| key | default | values | meaning |\n|---|---|---|---|")
        for key in _keys_of(section):
            default = f"`{default_text(key)}`" if default_text(key) else ""
            cells = (f"`{key.name}`", default, values_text(key), key.meta["doc"])
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def with_tables(text: str) -> str:
    """Return the text of docs/configuration.md with its tables written anew between their two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{markdown_tables()}{END}{rest.partition(END)[2]}"


def default_text(key: Key) -> str:
    """The default as one would write it in an override; "" for empty text."""
    if isinstance(key.default, bool):
        return str(key.default).lower()
    return "{}" if key.default == {} else str(key.default)


def values_text(key: Key) -> str:
    """What a key may be: its words, or its kind, unit and range."""
    low, high, unit = key.meta["low"], key.meta["high"], key.meta["unit"]
    if key.meta["choices"]:
        return ", ".join(key.meta["choices"])
    origin = typing.get_origin(key.number) or key.number
    kind = {int: "whole number", float: "number", bool: "true, false", str: "text", list: "list", dict: "mapping"}[
        origin
    ]
    if high is not None:
        kind += f" from {_number(low)} to {_number(high)}" if low is not None else f" up to {_number(high)}"
    elif low is not None:
        kind += f" from {_number(low)}"
    return ", or ".join((f"{kind}, in {unit}" if unit else kind, *key.meta["words"]))


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else f"{value:g}"


def _keys_of(section: str) -> list[Key]:
    return [key for key in KEYS.values() if key.section == section]


def _help_entry(key: Key, width: int) -> str:
    """Two lines or more: the key with its default, what it may be, and what it means."""
    head = f"  {key.name}={default_text(key)}"
    values = f"[{values_text(key)}]"
    gap = " " * max(2, 42 - len(head))
    if len(head) + len(gap) + len(values) <= width:
        lines = [head + gap + values]
    else:
        lines = [head, *textwrap.wrap(values, width, initial_indent=" " * 6, subsequent_indent=" " * 7)]
    return "\n".join(lines + textwrap.wrap(key.meta["doc"], width, initial_indent=" " * 6, subsequent_indent=" " * 6))


def main(argv: Sequence[str]) -> None:
    """Write the tables of the given Markdown file anew."""
    path = Path(argv[0] if argv else "docs/configuration.md")
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote the tables of {path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
