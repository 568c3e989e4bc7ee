"""The reference service on ranks of its own: many askers at once, what it says, and that its failures have its name."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from contract.test_learner import make_samples

from forge_async.actors.reference_actor import ReferenceActor, ReferencePlan
from forge_async.core.errors import ActorDiedError, StallError
from forge_async.learner.settings import ReferenceSettings
from tests.models import Reference, make_model

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


async def start_service(folder, num_ranks):
    plan = ReferencePlan(
        model_folder=str(folder),
        folders={"reference_logprobs": str(folder)},
        reference=ReferenceSettings(placement="service", ranks=num_ranks, timeout_s=30.0),
    )
    handle = await ReferenceActor.options(mesh_name="reference", procs=num_ranks, spmd=True).as_actor(plan)
    await handle.rank(0).connect.call_one(handle)
    return handle


async def test_workers_that_ask_at_once_are_answered_and_a_rank_that_hangs_or_dies_is_named(tmp_path):
    service = await start_service(make_model(tmp_path / "model"), num_ranks=2)
    first, model = service.rank(0), Reference(tmp_path / "model")
    batches = [make_samples(number, seed=number) for number in (1, 4, 7)]
    answers = await asyncio.gather(*(first.score.call_one(batch, timeout_s=30) for batch in batches))
    for batch, answer in zip(batches, answers, strict=True):
        edges = batch.bounds()
        rows = zip(edges[:-1], edges[1:], strict=True)
        expected = np.concatenate([[0, *model.logprobs(batch.token_ids[a:b])] for a, b in rows])
        assert answer["reference_logprobs"] == pytest.approx(expected * batch.loss_mask, abs=1e-5)

    os.kill(service.pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(StallError, match=r"A call of reference\[0\]\.score waited"):
            await first.score.call_one(batches[0], timeout_s=0.5)
    finally:
        os.kill(service.pids[1], signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"reference.*pid {service.pids[1]}"):
        await first.score.call_one(batches[0], timeout_s=10)
    await service.shutdown()
