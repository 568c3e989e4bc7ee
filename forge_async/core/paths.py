"""Where forge_async keeps what it makes once for a user, and how a folder comes to be there as a whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "FORGE_ASYNC_CACHE"
"""Environment variable that names the cache folder itself."""


def cache_dir() -> Path:
    """The user's cache folder of forge_async: $FORGE_ASYNC_CACHE, or forge_async in $XDG_CACHE_HOME or ~/.cache.

    Everything in it can be made again, so it may be deleted at any time when nothing runs. It is not created here.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser().resolve()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(shared) if shared.startswith("/") else Path.home() / ".cache"
    return base / "forge_async"


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to be filled, which takes that name when the block ends well, and goes when it does not.

    A reader sees a whole folder or none. Where another process was faster, its folder stays and ours goes.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        try:
            partial.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_orphans(target: Path) -> None:
    """Remove what processes that were killed left beside `target`, and an earlier try of this one."""
    for partial in target.parent.glob(f".{target.name}.*.partial"):
        pid = partial.name.split(".")[-2]
        if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(partial, ignore_errors=True)
