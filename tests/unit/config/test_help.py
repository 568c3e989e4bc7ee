"""`--help` and docs/configuration.md tell every key, and are current."""

from __future__ import annotations

from pathlib import Path

from forge_async.config.help import BEGIN, END, help_text, main, with_tables
from forge_async.config.schema import KEYS
from forge_async.config.sources import shipped_names

DOC = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_help_lists_every_key_with_default_and_meaning_in_96_columns() -> None:
    text = help_text()
    assert max(map(len, text.splitlines())) <= 96
    for key in KEYS.values():
        assert f"\n  {key.name}=" in text
        assert " ".join(key.meta["doc"].split()[:4]) in " ".join(text.split())
    for name in shipped_names():
        assert name in text
    assert "  async.max_staleness=2                   [whole number from 0, in steps, or auto]" in text


def test_help_is_readable_in_80_columns() -> None:
    body = help_text(width=80).partition("Keys with their defaults")[2]
    assert max(map(len, body.splitlines())) <= 80


def test_the_documented_tables_are_current() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    assert text == with_tables(text), "run: python -m forge_async.config.help docs/configuration.md"


def test_the_tables_are_written_anew_in_place(tmp_path: Path, capsys) -> None:
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{BEGIN}\nstale words\n{END}\nafter\n", encoding="utf-8")
    main([str(path)])
    text = path.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "`async.max_staleness`" in text
    assert "stale words" not in text and "wrote" in capsys.readouterr().out
