"""Files that a machine's death must not take along."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(folder: Path, *, deep: bool = True) -> None:
    """Have the disk hold a folder, and all that is in it if `deep`; without, its list of names alone."""
    for path in [*(sorted(folder.rglob("*")) if deep else []), folder]:
        if path.is_symlink():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
