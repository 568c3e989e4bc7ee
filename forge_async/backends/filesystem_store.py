"""Versions as files in a folder that all hosts share: safetensors for blobs, moved into place when they are whole.

It works across hosts, and what is written survives every process. Readers copy a file into their own memory, since a
mapping of it would break when another host deletes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from forge_async.core.errors import ConfigError, WeightsError
from forge_async.weights.codec import decode, encode
from forge_async.weights.transports import FILESYSTEM

MARK = ".forge_async-weights"
"""A file that says that the folder is ours to empty."""
BLOB, OBJECT = ".safetensors", ".object"
HEADER_BYTES = 128
"""Of a blob's file: 8 bytes of length, then JSON padded with blanks, as safetensors defines it."""


def prepare_folder(folder: Path) -> None:
    """Make the folder, or empty one that an earlier run left. Raises ConfigError for a folder of other things."""
    if folder.exists() and not (folder / MARK).exists() and any(folder.iterdir()):
        raise ConfigError(f"weights.folder={folder} holds other files; give a new folder, which will be made.")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)  # a client of a dead store may be writing there yet
    (folder / MARK).touch()


class FilesystemStore:
    """One process's access to the folder."""

    transport = FILESYSTEM

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def carried_by(self) -> str:
        return self.transport.name

    async def reserve(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    async def put(self, items: Mapping[str, Any], forget: Sequence[str] = ()) -> None:
        for key, value in items.items():
            await asyncio.to_thread(self._write, key, value)
        for prefix in forget:
            await self.delete(prefix)

    @asynccontextmanager
    async def reading(self, keys: Sequence[str]) -> AsyncIterator[list[Any]]:
        yield [await asyncio.to_thread(self._read, key) for key in keys]

    async def delete(self, prefix: str) -> None:
        await asyncio.to_thread(self._delete, prefix)

    async def keys(self) -> list[str]:
        return [key for key, _ in await asyncio.to_thread(lambda: list(self._files()))]

    async def close(self) -> None:
        """Nothing is held."""

    def _write(self, key: str, value: Any) -> None:
        is_blob = isinstance(value, torch.Tensor)
        target = self._folder / f"{key}{BLOB if is_blob else OBJECT}"
        partial = self._folder / f".partial-{uuid.uuid4().hex}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                if is_blob:
                    file.write(_header(value.numel()))
                file.write(value.numpy().data if is_blob else encode(value))
            partial.replace(target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise WeightsError(
                f"{target} cannot be written ({error}); free space there, or move weights.folder."
            ) from error

    def _read(self, key: str) -> Any:
        try:
            with contextlib.suppress(FileNotFoundError), (self._folder / f"{key}{OBJECT}").open("rb") as file:
                return decode(file.read())
            with (self._folder / f"{key}{BLOB}").open("rb") as file:
                return _blob(file, key)
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def _delete(self, prefix: str) -> None:
        doomed = [(key, path) for key, path in self._files() if key.startswith(prefix)]
        for _, path in sorted(doomed, key=lambda item: not item[0].endswith("/manifest")):
            path.unlink(missing_ok=True)
        for folder in sorted({path.parent for _, path in doomed}, key=lambda path: -len(path.parts)):
            while folder != self._folder:
                with contextlib.suppress(OSError):  # not empty, or gone
                    folder.rmdir()
                folder = folder.parent

    def _files(self) -> Iterator[tuple[str, Path]]:
        for suffix in (BLOB, OBJECT):
            for path in self._folder.rglob(f"*{suffix}"):
                yield path.relative_to(self._folder).as_posix().removesuffix(suffix), path


def _header(num_bytes: int) -> bytes:
    text = json.dumps({"blob": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}})
    return struct.pack("<Q", HEADER_BYTES - 8) + text.encode().ljust(HEADER_BYTES - 8)


def _blob(file: BinaryIO, key: str) -> torch.Tensor:
    num_bytes = os.fstat(file.fileno()).st_size - HEADER_BYTES
    blob = torch.empty(max(num_bytes, 0), dtype=torch.uint8)
    file.seek(HEADER_BYTES)
    view = blob.numpy().data
    while view:
        if not (got := file.readinto(view)):  # pyright: ignore[reportAttributeAccessIssue]
            raise WeightsError(f"{key} became shorter while it was read; pull again.")
        view = view[got:]
    return blob
