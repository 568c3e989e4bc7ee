"""A world of one process, for learners outside a run: benchmarks, checks."""

from __future__ import annotations

import os
import socket
from functools import cache


def be_the_only_rank() -> None:
    """Set the environment of torch's elastic launch for a world of one. May be called again."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port()))


@cache
def _port() -> int:
    """One that was free when this process first asked: learners of one process meet in the same place."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
