"""Finished runs in a JSON file, so that a benchmark can go on where an earlier call stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forge_async
from forge_async.config import Config
from forge_async.core.errors import ConfigError
from forge_async.observe.jsonl import plain
from forge_async.observe.run_directory import write_atomically

Record = Mapping[str, Any]
WITHOUT_EFFECT = ("seed", "run", "checkpoint", "sft", "job", "observe", "weights")
"""Keys and sections that change nothing of what is learnt; the seed stands in a record by itself."""
NO_CODE_OF_A_RUN = ("apps", "actors", "runtime", "observe")
"""Parts of the package that runs in one process do not use."""


class ResultsFile:
    """Records by key, written anew as a whole with every one that is added."""

    def __init__(self, path: Path) -> None:
        """Read what is there. Raises ConfigError when that is no such file."""
        self._path, self._records = path, dict[str, Record]()
        if path.exists():
            try:
                self._records = {record["key"]: record for record in json.loads(path.read_text())["runs"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"--out {path} holds no runs of this program; give another file.") from error

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __getitem__(self, key: str) -> Record:
        return self._records[key]

    def add(self, record: Record) -> None:
        """Keep a finished run, which has a `key`."""
        self._records[record["key"]] = plain(dict(record))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, json.dumps({"runs": list(self._records.values())}, indent=1) + "\n")


def run_key(config: Config, model: str, code: str) -> str:
    """What a run's result depends on, as a short hash: configuration with seed, model, code."""
    parts = {key: value for key, value in _flat(config).items() if key.partition(".")[0] not in WITHOUT_EFFECT}
    text = json.dumps([parts, config.root.seed, model, code], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_hash() -> str:
    """Hash of the sources that a run in one process is made of, so that other edits leave results in use."""
    root = Path(forge_async.__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in NO_CODE_OF_A_RUN]
    return _hash_of([*files, Path(__file__).with_name("one_process.py")])


def all_code_hash() -> str:
    """Hash of every source of the package: a run's times depend on all of them."""
    root = Path(forge_async.__file__).parent
    return _hash_of(sorted(root.rglob("*.py")))


def model_hash(folder: Path) -> str:
    """Hash of a model's weights and of what reads its tokens."""
    return _hash_of(sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]))


def _hash_of(files: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def _flat(config: Config) -> dict[str, Any]:
    from forge_async.config.schema import KEYS

    return {name: config.value(name) for name in KEYS}
