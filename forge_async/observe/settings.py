"""Settings of what a run writes about itself."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveSettings:
    """Keys under `observe`."""

    tensorboard: bool = setting(False, "also write TensorBoard events to <run.dir>/tensorboard")
    trace: bool = setting(True, "write trace.json, a Chrome/Perfetto timeline of every actor")
