"""A resolved configuration loads again as it was: config.yaml reproduces a run."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forge_async.config import Config, compose, from_file
from forge_async.config.schema import KEYS, Key

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12) | st.sampled_from(
    [
        "${",
        "\\${a}",
        "a\\\\${b",
        "null",
        "~",
        "yes",
        "012",
        "1e-6",
        "01:30",
        "'",
        '"',
        "# x",
        ": ",
        "{",
        "[a",
        "\n",
        " ",
    ]
)
PLAIN = TEXT | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)


def values(key: Key) -> st.SearchStrategy[Any]:
    """Legal values of one key."""
    low, high = key.meta["low"], key.meta["high"]
    if key.meta["choices"]:
        return st.sampled_from(key.meta["choices"])
    origin = typing.get_origin(key.number) or key.number
    strategy = {
        int: st.integers(int(low or 0), int(high or 2**40)),
        float: st.floats(low if low is not None else 0.0, high if high is not None else 1e30),
        bool: st.booleans(),
        str: TEXT.filter(lambda text: not text.startswith("~/")),
        list: st.lists(st.integers(1, 99) if key.type == list[int] else TEXT, max_size=3),
        dict: st.dictionaries(TEXT, PLAIN, max_size=3),
    }[origin]
    return strategy | st.sampled_from(key.meta["words"]) if key.meta["words"] else strategy


def change_of(key: Key) -> st.SearchStrategy[tuple[str, Any]]:
    return st.tuples(st.just(key.name), values(key))


CHANGES = st.lists(st.sampled_from(list(KEYS.values())).flatmap(change_of), max_size=12).map(dict)


@settings(max_examples=30)
@given(changes=CHANGES)
def test_yaml_of_any_configuration_loads_as_the_same(changes: dict[str, Any], tmp_path_factory) -> None:
    config = Config().replace(changes)
    path = Path(tmp_path_factory.getbasetemp()) / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert from_file(path) == config


SIMPLE = [key for key in KEYS.values() if key.type in (int, float, bool) or key.meta["choices"]]


@settings(max_examples=15)
@given(changes=st.lists(st.sampled_from(SIMPLE).flatmap(change_of), max_size=12).map(dict))
def test_overrides_then_yaml_then_load_give_the_same(changes: dict[str, Any], tmp_path_factory) -> None:
    config = compose([], [f"{key}={value}" for key, value in changes.items()])
    presets = {"async.max_staleness", "async.window"} if "async.buffer" in changes else set()
    assert all(config.value(key) == value for key, value in changes.items() if key not in presets)
    path = Path(tmp_path_factory.getbasetemp()) / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8", newline="")
    assert from_file(path) == config


def test_yaml_names_every_key_once_under_its_section() -> None:
    text = Config().to_yaml()
    assert "asynchrony" not in text and "\nasync:\n  max_staleness: 2\n" in text
    assert all(f"{key.field}:" in text for key in KEYS.values())
