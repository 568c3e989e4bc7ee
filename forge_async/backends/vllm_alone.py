"""One request served by itself, beside vLLM's others: they keep their KV and their places in the line, and wait.

Like `vllm_inside.py` this touches what vLLM offers no public way to. Written against vLLM 0.32: a scheduler that finds
nobody but a newcomer serves it, and whoever is not scheduled in a step may go on in a later one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def alone(scheduler: Any) -> Iterator[None]:
    """Until the exit, `scheduler` serves only requests that come meanwhile; what then is left of these is next in line.

    vLLM's second model runner has a slot for each request that runs. Where all are taken, those that run go on too, and
    the newcomer is the next to get one.
    """
    waiting, holding, set_aside = scheduler.waiting, scheduler.kv_holding_waiting, []
    if not scheduler.use_v2_model_runner or len(scheduler.running) < scheduler.max_num_running_reqs:
        set_aside, scheduler.running = scheduler.running, []
    scheduler.waiting, scheduler.kv_holding_waiting = type(waiting)(), type(holding)()
    try:
        yield
    finally:
        # One that was set aside may have ended by a token of the step before.
        scheduler.running = [each for each in set_aside if each.request_id in scheduler.requests] + scheduler.running
        waiting.prepend_requests(list(scheduler.waiting)[::-1])
        holding.prepend_requests(list(scheduler.kv_holding_waiting)[::-1])
        scheduler.waiting, scheduler.kv_holding_waiting = waiting, holding
