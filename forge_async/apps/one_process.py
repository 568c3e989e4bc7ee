"""What programs without a run's meshes say where its configuration spreads a model over ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from forge_async.config.schema import Config

ENGINE = "policy.tensor_parallel"
LEARNER = "learner.ranks"


def say_one_process(config: Config, *keys: str) -> None:
    """Tell on the standard error which numbers of ranks are not followed, since one process holds the whole model.

    Args:
        config: of the run, or of the command line.
        keys: those that would matter to the program: `ENGINE`, `LEARNER`.
    """
    ranks: Mapping[str, int] = {ENGINE: config.policy.tensor_parallel, LEARNER: config.learner.ranks}
    if asked := [f"{key}={ranks[key]}" for key in keys if ranks[key] > 1]:
        are = "are" if len(asked) > 1 else "is"
        print(
            f"{' and '.join(asked)} {are} for training: here one process holds the whole model, in the memory of one "
            "device.",
            file=sys.stderr,
            flush=True,
        )
