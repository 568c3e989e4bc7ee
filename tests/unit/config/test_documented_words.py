"""Every `key=value` that the README and the docs show is a key that exists, with a value that it takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forge_async.config import load
from forge_async.config.schema import KEYS
from forge_async.core.errors import ConfigError

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WORD = re.compile(r"(?<![\w./=-])([a-z_]+(?:\.[a-z_]+)*)=([^\s`|,;)\]]+)")


def words_of(page: Path) -> list[str]:
    """The words in code spans and code blocks that look like settings, less those that stand for any value."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"```[a-z]*\n.*?```|`[^`\n]+`", text, re.DOTALL)
    found = [f"{key}={value.rstrip('.')}" for part in code for key, value in WORD.findall(part) if is_key(key)]
    return [word for word in found if not re.search(r"=(\.*|<.*|FILE|DIR|\.\.\.)$", word)]


def is_key(name: str) -> bool:
    """Whether the name has the form of a key: a section that exists, or a key without one."""
    return name in KEYS or name.partition(".")[0] in {key.section for key in KEYS.values() if key.section}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_in_the_page_is_known(page: Path) -> None:
    unknown = []
    for word in words_of(page):
        try:
            load([word])
        except ConfigError as error:
            # What the value is or what it goes with is another matter: a page may show a combination in parts.
            if str(error).startswith("Unknown key"):
                unknown.append(f"{word}: {error}")
    assert unknown == []


def test_the_search_finds_what_the_readme_shows() -> None:
    assert {"reward=my.py:score", "task.options.max_terms=3"} <= set(words_of(ROOT / "README.md"))
