"""What the words of `async.buffer` stand for."""

from __future__ import annotations

from typing import Any

from forge_async.replay.bound import UNLIMITED

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"async.max_staleness": 0, "async.window": 1},
    "double": {"async.max_staleness": 1, "async.window": 1},
    "stream": {"async.max_staleness": UNLIMITED, "async.window": UNLIMITED},
}
"""Preset -> the dials it sets; `bounded` sets none."""
