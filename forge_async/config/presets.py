"""What words that set other keys stand for: `async.buffer`, `objective.name`, `async.correction`."""

from __future__ import annotations

from typing import Any

from forge_async.replay.bound import UNLIMITED

PRESETS: dict[str, dict[str, Any]] = {
    "none": {"async.max_staleness": 0, "async.window": 1},
    "double": {"async.max_staleness": 1, "async.window": 1},
    "stream": {"async.max_staleness": UNLIMITED, "async.window": UNLIMITED},
}
"""`async.buffer` -> the dials it sets; `bounded` sets none. A dial that says otherwise beside it is refused."""

OBJECTIVE_PRESETS: dict[str, dict[str, Any]] = {
    "dr_grpo": {"objective.denominator": "constant", "advantage.scale": "none"},
    "dapo": {"advantage.zero_variance": "refill"},
    "gspo": {"objective.denominator": "sequence_means", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4},
    "cispo": {"objective.clip_low": 1.0, "objective.clip_high": 4.0},
    "rloo": {
        "objective.denominator": "sequences",
        "advantage.baseline": "leave_one_out",
        "advantage.scale": "none",
    },
    "reinforce_pp": {
        "advantage.baseline": "none",
        "advantage.scale": "none",
        "objective.normalise_advantages": True,
    },
    "ppo": {
        "advantage.baseline": "none",
        "advantage.scale": "none",
        "objective.normalise_advantages": True,
    },
}
"""`objective.name` -> the keys that differ from their defaults; the user may say otherwise."""

CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "icepop": {"correction.low": 0.5, "correction.high": 5.0},
    "geometric_mask": {"correction.low": 0.99, "correction.high": 1.01},
    "aipo": {"correction.high": 4.0},
    "decoupled": {"correction.high": 5.0},
    "decoupled_approx": {"correction.high": 5.0},
    "vtrace": {"correction.high": 1.0},
}
"""`async.correction` -> the keys that differ from their defaults; the user may say otherwise."""

ALL_PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "async.buffer": PRESETS,
    "objective.name": OBJECTIVE_PRESETS,
    "async.correction": CORRECTION_PRESETS,
}
"""Key -> its words -> what they set."""
