"""Every bad input ends in a ConfigError of one sentence that names the key, the value and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_async.config import load
from forge_async.config.schema import KEYS, nearest_keys
from forge_async.core.errors import ConfigError


def sentence(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    text = str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in text and text.endswith((".", "?")) and len(text) < 500, text
    return text


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        # unknown keys
        ("max_staleness=1", ["Unknown key max_staleness=1", "did you mean async.max_staleness?"]),
        ("async.max_stalness=1", ["async.max_stalness=1", "did you mean async.max_staleness?"]),
        ("asink.window=1", ["asink.window=1", "did you mean async.window?"]),
        ("learner.lr=1", ["learner.lr", "did you mean optimizer.lr"]),
        ("dtype=float32", ["policy.dtype or learner.dtype"]),
        ("learning_rate=1", ["did you mean optimizer.lr"]),
        ("steps.foo=1", ["steps.foo", "did you mean steps?"]),
        ("job.slurm_args[0]=x", ["did you mean job.slurm_args?"]),
        ("xyzzy=1", ["Unknown key xyzzy=1", "--help"]),
        ("async=3", ["async=3", "is a section", "async.max_staleness"]),
        # wrong types
        ("steps=abc", ["steps=abc is not a whole number", "steps=260"]),
        ("steps=1.5", ["steps=1.5 is not a whole number"]),
        ("steps=true", ["steps=true is not a whole number"]),
        ("steps=[1]", ["steps=[1] is not a whole number"]),
        ("steps=", ["steps is given no value", "steps=260"]),
        ("optimizer.lr=fast", ["optimizer.lr=fast is not a number"]),
        ("optimizer.lr=nan", ["optimizer.lr=nan is not a finite number"]),
        ("optimizer.lr=.inf", ["optimizer.lr=inf is not a finite number"]),
        ("observe.trace=maybe", ["observe.trace=maybe is not true or false"]),
        ("job.slurm_args=--a", ["job.slurm_args=--a is not a list", "job.slurm_args=[a,b]"]),
        ("eval.k=[a]", ["is not a list of whole numbers", "eval.k=[1,8]"]),
        ("task.options=3", ["task.options=3 is not a mapping", "task.options={a: 1}"]),
        ("task.options.a=[1]", ["task.options.a=[1] is not a plain value"]),
        ("task.options={a: [1]}", ["task.options={'a': [1]} is not a mapping of plain values"]),
        ("task.options={1: 2}", ["task.options={1: 2} is not"]),
        ("async.max_staleness=1.5", ["async.max_staleness=1.5 is not a whole number or auto"]),
        ("async.max_staleness=true", ["async.max_staleness=true is not a whole number or auto"]),
        ("async.max_staleness=fast", ["async.max_staleness=fast is neither a number nor auto"]),
        ("async.max_staleness=-1", ["async.max_staleness=-1 is below its least value 0 steps"]),
        # words that do not parse
        ("steps", ["steps is no override", "key=value"]),
        ("=3", ["=3 is no override"]),
        ("tiny_cpu", ["did you mean --config tiny_cpu?"]),
        ("job.slurm_args=[--a", ["job.slurm_args=[--a is not YAML", "quotes"]),
        ("steps=!!python/name:os.system x", ["cannot be read", "plain YAML"]),
        ("--steps=3", ["Unknown option --steps=3", "steps=3"]),
        ("--frobnicate", ["Unknown option --frobnicate", "--help"]),
        ("--config", ["--config needs"]),
        # interpolation
        ("steps=${", ["steps=${ is no interpolation", "${oc.env:NAME}"]),
        (
            "run.dir=${oc.env:ABSENT}",
            ["run.dir=${oc.env:ABSENT}", "ABSENT, which is not set", "${oc.env:ABSENT,value}"],
        ),
        ("steps=${nope}", ["steps=${nope} refers to nope", "no key"]),
        ("steps=${steps}", ["refers to itself"]),
        ("steps=${task.name}", ["steps=${task.name} resolves to spell", "not a whole number"]),
        ("steps=${frob:1}", ["steps=${frob:1} cannot be resolved"]),
        ("task.options.a=${oc.env:ABSENT}", ["task.options=${oc.env:ABSENT}", "ABSENT"]),
        # ranges
        ("steps=0", ["steps=0 is below", "1 steps"]),
        ("async.fresh_fraction=1.5", ["async.fresh_fraction=1.5 is above"]),
        ("task.chat=sometimes", ["task.chat=sometimes is not one of auto, on, off"]),
    ],
)
def test_bad_words_are_refused(word: str, parts: list[str], monkeypatch) -> None:
    monkeypatch.delenv("ABSENT", raising=False)
    text = sentence([word])
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("steps: 3\nasync: [1\n", ["bad.yaml, line 3", "is not YAML"]),
        ("a: b: c\n", ["bad.yaml", "is not YAML"]),
        ("steps: 1\n---\nsteps: 2\n", ["bad.yaml, line 2", "is not YAML"]),
        ("- 1\n- 2\n", ["bad.yaml holds no keys"]),
        ("steps\n", ["bad.yaml holds no keys"]),
        (
            "seed: 1\nasync:\n  max_stalness: 3\n",
            ["bad.yaml, line 3: Unknown key async.max_stalness=3", "max_staleness"],
        ),
        ("lerner:\n  ranks: 3\n", ["bad.yaml, line 2: Unknown key lerner.ranks=3", "did you mean learner.ranks?"]),
        ("steps: 1\nsteps: 2\n", ["bad.yaml, line 2: steps is given twice"]),
        ("steps: many\n", ["bad.yaml, line 1: steps=many is not a whole number"]),
        ("steps:\n", ["bad.yaml, line 1: steps is given no value"]),
        ("async: 3\n", ["bad.yaml, line 1: async=3", "is a section"]),
        ("async: [3]\n", ["bad.yaml, line 1", "is a section"]),
        ("task: {name: [a]}\n", ["bad.yaml, line 1: task.name=['a'] is not text"]),
        ("seed: 0\nsteps: ${nope\n", ["bad.yaml, line 2: steps=${nope is no interpolation"]),
        ("steps: ${nope}\n", ["bad.yaml, line 1: steps=${nope} refers to nope"]),
        ("a: &a\n  b: *a\n", ["bad.yaml", "Unknown key a.b"]),
        ("steps: !!python/name:os.system\n", ["bad.yaml", "cannot be read"]),
    ],
)
def test_bad_files_are_refused_with_file_and_line(content: str, parts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content, encoding="utf-8")
    text = sentence(["--config", str(path)])
    for part in parts:
        assert part in text, text


def test_a_missing_file_is_answered_with_the_shipped_names(tmp_path: Path) -> None:
    assert "tiny_cpu" in sentence(["--config", "tiny_gpu"])
    assert "is no file" in sentence(["--config", str(tmp_path)])


def test_names_that_no_file_system_takes_are_refused() -> None:
    assert "was not found" in sentence(["--config", "a" * 300])
    assert "is no override" in sentence(["a" * 300])
    assert "cannot be reached" in sentence([f"prompts={'a' * 300}.jsonl"])
    assert "cannot be reached" in sentence([f"run.dir={'a' * 300}"])


def test_a_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert "not UTF-8" in sentence(["--config", str(path)])
    path.write_bytes(b"steps: \x00")
    assert "is not YAML" in sentence(["--config", str(path)])


def test_nearest_keys_are_known_keys() -> None:
    for name in (*KEYS, *(key[1:] for key in KEYS), *(key.replace("_", "") for key in KEYS)):
        assert set(nearest_keys(name)) <= KEYS.keys()
    assert nearest_keys("max_staleness") == ["async.max_staleness"]
