"""What the ends of a run's actors call, and what they need not: a call costs more than most of what it carries."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_async.actors.forge_actor import ActorHandle
from forge_async.actors.learner_actor import LearnerActor
from forge_async.actors.replay_actor import ReplayActor
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import WorkerReport
from forge_async.replay.admission import Prompts
from forge_async.replay.settings import AsyncSettings
from forge_async.runtime.wiring import RemoteLearner, RemoteWorkers
from forge_async.weights.retention import Committed
from tests.strategies import make_group

pytestmark = [pytest.mark.stack, pytest.mark.timeout(40)]
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
    assert await workers.make([], "policy_0") == ["record"]
    handles[1]._answer = report
    assert await workers.stats() == [report, report]
    assert calls == [("rollout_0", "make", [], "policy_0"), ("rollout_1", "stats")]


async def test_a_learner_rank_that_asks_for_its_share_says_how_many_steps_it_has_done() -> None:
    calls: list[Any] = []
    learner = LearnerActor.__new__(LearnerActor)
    learner._learner = cast(Any, SimpleNamespace(batch_rank=1, batch_ranks=2, version=VERSION))
    learner._replay = cast(ActorHandle, CountingHandle(1, "share", calls))
    assert await learner._take_share(4, 60.0) == "share"
    assert calls == [("all", "take_share", 4, 1, 2, 60.0, 3)]


async def test_what_ranks_say_when_they_ask_ends_the_groups_of_the_steps_before_once() -> None:
    """Of two ranks one is late: it tells what the other has told, and asks for a batch that was made."""
    settings, prompts = AsyncSettings(max_staleness=2), Prompts(source="s", epoch_size=50)
    replay = await ReplayActor.options().as_actor(settings, groups_per_step=2, prompts=prompts)
    try:
        await replay.add_replica.call_one("policy_0", 0)
        given = await replay.admit.call_one("policy_0", 6)
        await replay.put.call_one([make_group(one.index, one.prompt_id, [[0]]) for one in given])
        trained = []
        for step, rank, num_done in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 0, 1), (1, 1, 0), (2, 1, 1), (2, 0, 2)):
            await replay.take_share.call_one(step, rank, 2, 10.0, num_done)
            trained.append((await replay.state.call_one())["groups/trained"])
        assert trained == [0, 0, 0, 2, 2, 2, 4]
    finally:
        await replay.shutdown()
