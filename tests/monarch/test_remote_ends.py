"""What the ends of a run's actors call, and what they need not: a call costs more than most of what it carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_async.actors.forge_actor import ActorHandle
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import WorkerReport
from forge_async.runtime.wiring import RemoteLearner, RemoteWorkers
from forge_async.weights.retention import Committed

pytestmark = pytest.mark.stack
VERSION = PolicyVersion(step=3)


class CountingHandle:
    """An actor's handle that notes which calls are made of it, and by which rank alone."""

    def __init__(self, num_ranks: int, answer: Any = None, calls: list[Any] | None = None, name: str = "all") -> None:
        self.processes = tuple(range(num_ranks))
        self.calls = [] if calls is None else calls
        self._answer, self._name = answer, name

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((self._name, name, *args))
            return self._answer

        return SimpleNamespace(call_ranks=call, call_one=call)

    def rank(self, rank: int) -> CountingHandle:
        return CountingHandle(1, self._answer, self.calls, name=f"rank {rank}")


def learner_of(num_ranks: int) -> tuple[RemoteLearner, list[Any]]:
    handle = CountingHandle(num_ranks, Committed(num_bytes=8))
    return RemoteLearner(cast(ActorHandle, handle), 60.0, 60.0), handle.calls


@pytest.mark.parametrize("num_ranks", [1, 2])
async def test_a_learner_of_one_rank_is_not_asked_to_stage_what_it_commits(num_ranks: int) -> None:
    learner, calls = learner_of(num_ranks)
    await learner.stage(VERSION)
    assert await learner.commit(VERSION, [PolicyVersion(step=1)]) == Committed(num_bytes=8)
    staging = [("all", "stage", VERSION)] if num_ranks > 1 else []
    assert calls == [*staging, ("rank 0", "commit", VERSION, [PolicyVersion(step=1)])]


async def test_a_worker_that_has_just_told_what_it_did_is_not_asked() -> None:
    report = WorkerReport(score_s=0.5, spans=(), rss_bytes=7, cpu_s=1.0)
    calls: list[Any] = []
    handles = [CountingHandle(1, (["record"], report), calls, name=f"rollout_{number}") for number in range(2)]
    workers = RemoteWorkers(cast(Any, handles), 60.0)
    assert await workers.make((), "policy_0") == ["record"]
    handles[1]._answer = report
    assert await workers.stats() == [report, report]
    assert calls == [("rollout_0", "make", [], "policy_0"), ("rollout_1", "stats")]
