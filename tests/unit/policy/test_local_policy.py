"""Submissions by tickets that their senders choose: what one call tells, and cuts that come before what they cut."""

import asyncio

import pytest

from forge_async.core.errors import PolicyError, RequestRefusedError
from forge_async.policy import local
from forge_async.policy.local import LocalPolicy
from tests.fakes import FakeEngine
from tests.serving import GatedEngine, added, request, serving, until

pytestmark = pytest.mark.timeout(20)


async def test_submitting_returns_what_finishes_first_and_the_rest_is_collected():
    engine = GatedEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service)
        submitting = asyncio.create_task(
            policy.submit("t", [request("long", max_new_tokens=6), request("short", max_new_tokens=2)], 0.0)
        )
        engine.let(2)
        results, done = await submitting
        assert ([result.id for result in results], done) == (["short"], False)
        engine.let(10)
        results, done = await policy.collect("t", 0.0)
        assert ([result.id for result in results], done) == (["long"], True)
        with pytest.raises(PolicyError, match="The policy knows no ticket t: it was collected to its end"):
            await policy.collect("t", 0.0)


async def test_one_call_is_enough_for_what_finishes_together():
    async with serving(FakeEngine()) as service:
        requests = [request(name) for name in "ab"]
        results, done = await LocalPolicy(service).submit("t", requests, 3600.0)
        assert ([result.id for result in results], done) == (["a", "b"], True)


async def test_a_cut_ends_a_submission_that_waits():
    engine = GatedEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service)
        submitting = asyncio.create_task(policy.submit("t", [request("a", max_new_tokens=20)], 3600.0))
        engine.let(3)
        await until(lambda: engine.num_steps == 3)
        cutting = asyncio.create_task(policy.cut("t"))
        await until(lambda: bool(service._commands))
        engine.let(50)
        (result,) = await cutting
        assert result.completions.cut.tolist() == [True, True] and result.completions.lengths[0] in (3, 4)
        assert await submitting == ([], True)
        assert await policy.cut("t") == []


async def test_what_is_cut_before_it_arrives_never_enters_the_engine():
    engine = FakeEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service)
        assert await policy.cut("t") == []
        results, done = await policy.submit("t", [request("a"), request("b")], 0.0)
        assert [(result.id, result.completions.cut.tolist()) for result in results] == [
            ("a", [True, True]), ("b", [True, True])
        ]  # fmt: skip
        assert done and not added(engine) and service.num_unfinished() == 0
        (result,), done = await policy.submit("u", [request("a")], 0.0)
        assert done and not result.completions.cut.any(), "others are not concerned"


async def test_of_what_is_cut_in_part_before_it_arrives_the_rest_is_made():
    engine = FakeEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service)
        await policy.cut("t", ["b"])
        (cut,), done = await policy.submit("t", [request("a"), request("b")], 0.0)
        assert (cut.id, cut.completions.cut.tolist(), done) == ("b", [True, True], False)
        (made,), done = await policy.collect("t", 0.0)
        assert (made.id, made.completions.cut.tolist(), done) == ("a", [False, False], True)
        assert added(engine) == ["a"]


@pytest.mark.parametrize(("cuts", "left"), [([["a"], ["b"]], ["c"]), ([None, ["a"]], []), ([["a"], None], [])], ids=str)
async def test_of_several_cuts_before_it_arrives_none_is_forgotten(cuts, left):
    engine = FakeEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service)
        for ids in cuts:
            assert await policy.cut("t", ids) == []
        results, done = await policy.submit("t", [request(name) for name in "abc"], 0.0)
        assert [result.id for result in results] == [name for name in "abc" if name not in left]
        assert all(result.completions.cut.all() for result in results) and done == (not left)
        while not done:
            _, done = await policy.collect("t", 0.0)
        assert added(engine) == left and service.num_unfinished() == 0


async def test_cuts_of_what_never_comes_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(local, "MAX_EARLY", 2)
    async with serving(FakeEngine()) as service:
        policy = LocalPolicy(service)
        for name in "xyz":
            await policy.cut(name)
        cut = {name: (await policy.submit(name, [request("a")], 0.0))[0][0].completions.cut.all() for name in "xyz"}
        assert cut == {"x": False, "y": True, "z": True}


async def test_a_ticket_that_is_in_use_is_refused():
    engine = GatedEngine()
    async with serving(engine) as service:
        policy = LocalPolicy(service, "policy_3")
        submitting = asyncio.create_task(policy.submit("t", [request("a")], 0.0))
        await until(lambda: service.num_unfinished() == 1)
        with pytest.raises(PolicyError, match="policy_3 has a ticket t already; give each submission one of its own"):
            await policy.submit("t", [request("b")], 0.0)
        engine.let(50)
        (result,), done = await submitting
        assert (result.id, done) == ("a", True)


async def test_refusals_are_told_by_the_submission_itself_where_nothing_else_is_left():
    async with serving(FakeEngine(max_tokens=8)) as service:
        policy = LocalPolicy(service)
        with pytest.raises(RequestRefusedError, match="refused request a"):
            await policy.submit("t", [request("a", max_new_tokens=60)], 3600.0)
        (result,), done = await policy.submit("u", [request("a", max_new_tokens=60), request("b")], 3600.0)
        assert (result.id, done) == ("b", False)
        with pytest.raises(RequestRefusedError, match="refused request a"):
            await policy.collect("u", 3600.0)
