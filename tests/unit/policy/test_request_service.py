import asyncio
import threading

import pytest

from forge_async.core.errors import PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.policy.service import RequestService
from tests.fakes import TABLE, FakeEngine, bigram_table
from tests.serving import GatedEngine, added, request, serving, until

pytestmark = pytest.mark.timeout(20)


async def test_requests_enter_the_engine_in_the_order_of_their_arrival():
    engine = FakeEngine()
    async with serving(engine) as service:
        tickets = [service.submit([request(f"{i}a"), request(f"{i}b")]) for i in range(3)]
        await until(lambda: all(ticket.remaining == 0 for ticket in tickets))
        assert added(engine) == ["0a", "0b", "1a", "1b", "2a", "2b"]
        assert [call for call, _ in engine.log[:6]] == ["add"] * 6, "together, before the first step"


async def test_results_come_in_the_order_of_the_requests():
    async with serving(FakeEngine()) as service:
        requests = [request(i, max_new_tokens=length) for i, length in enumerate((6, 1, 3))]
        results = await service.generate(requests)
        assert [result.id for result in results] == ["0", "1", "2"]
        assert [result.completions.lengths.tolist() for result in results] == [[6, 6], [1, 1], [3, 3]]
        assert await service.generate([]) == []
        assert service.num_unfinished() == 0


async def test_a_swap_between_steps_stamps_each_token_with_the_version_that_made_it():
    engine = GatedEngine()
    async with serving(engine) as service:
        long, short = service.submit([request("long", max_new_tokens=6)]), service.submit([request("short")])
        engine.let(2)
        await until(lambda: engine.num_steps == 2)
        new = PolicyVersion(incarnation=1, step=9)
        swap = asyncio.create_task(service.between_steps(lambda e: e.load({TABLE: bigram_table(1)}, new)))
        await asyncio.sleep(0)
        engine.let(10)
        await swap
        (result,), done = await service.collect(long, 3600.0)
        assert done
        runs = result.completions.versions
        made_by_old = int(runs.lengths[0])
        # The step that was under way when the swap was asked for still belongs to the old version.
        assert made_by_old in (2, 3)
        assert runs.steps.tolist() == [0, 9, 0, 9]
        assert runs.incarnations.tolist() == [0, 1, 0, 1]
        assert runs.lengths.tolist() == [made_by_old, 6 - made_by_old] * 2
        (result,), _ = await service.collect(short, 0.0)
        assert result.completions.versions.lengths.tolist() == [made_by_old, 5 - made_by_old] * 2
        stats = service.take_stats()
        assert [step for step, _ in stats.swaps] == [9]
        assert stats.tokens == 2 * 6 + 2 * 5
        assert stats.steps == 6
        assert stats.spans
        assert service.take_stats().tokens == 0


async def test_collect_takes_what_is_ready_and_lingers_for_what_comes_soon():
    engine = GatedEngine()
    async with serving(engine) as service:
        ticket = service.submit([request("a", max_new_tokens=1), request("b", max_new_tokens=2),
                                 request("c", max_new_tokens=9)])  # fmt: skip
        engine.let(1)
        results, done = await service.collect(ticket, 0.0)
        assert ([result.id for result in results], done) == (["a"], False)
        lingering = asyncio.create_task(service.collect(ticket, 0.2))
        engine.let(1)
        results, done = await lingering
        assert ([result.id for result in results], done) == (["b"], False)
        engine.let(20)
        results, done = await service.collect(ticket, 3600.0)
        assert ([result.id for result in results], done) == (["c"], True)


async def test_lingering_ends_as_soon_as_nothing_is_left():
    async with serving(FakeEngine()) as service:
        ticket = service.submit([request("a", max_new_tokens=1), request("b", max_new_tokens=4)])
        async with asyncio.timeout(5):
            results, done = await service.collect(ticket, 3600.0)
        assert ([result.id for result in results], done) == (["a", "b"], True)


async def test_an_engine_that_fails_is_named_to_everyone_who_waits():
    engine = GatedEngine()
    engine.fail_at_step = 2
    async with serving(engine) as service:
        first = service.submit([request("a")])
        engine.let(1)
        await until(lambda: engine.num_steps == 1)
        second = service.submit([request("b")])
        waiting = [
            asyncio.create_task(service.collect(first, 0.0)),
            asyncio.create_task(service.collect(second, 3600.0)),
            asyncio.create_task(service.between_steps(lambda engine: engine.occupancy())),
        ]
        await asyncio.sleep(0.01)
        queued = asyncio.create_task(service.generate([request("c")]))
        engine.let(5)
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(*waiting, queued, return_exceptions=True)
        # A command that ran in a turn before the failing one was answered; all others hear what happened.
        told = [outcome for outcome in outcomes if isinstance(outcome, PolicyError)]
        assert len(told) >= 3
        assert {str(error) for error in told} == {"The engine failed: RuntimeError: out of memory"}
        with pytest.raises(PolicyError, match="serves no more.*out of memory"):
            service.submit([request("d")])
        with pytest.raises(PolicyError, match="serves no more.*out of memory"):
            await service.between_steps(lambda engine: None)
        assert service.num_unfinished() == 0


async def test_a_command_of_the_very_turn_that_fails_is_told_too():
    engine = FakeEngine()
    engine.fail_at_step = 1
    async with serving(engine) as service:
        command = asyncio.create_task(service.between_steps(lambda engine: "ran"))
        await asyncio.sleep(0)
        ticket = service.submit([request("a")])
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(command, service.collect(ticket, 0.0), return_exceptions=True)
        assert all(isinstance(outcome, PolicyError) for outcome in outcomes)


async def test_a_refused_request_is_told_in_the_engines_own_words():
    async with serving(FakeEngine()) as service:
        with pytest.raises(PolicyError, match="refused request big: it is too long"):
            await service.generate([request("big", max_new_tokens=1000)])


async def test_a_refused_request_ends_alone():
    async with serving(FakeEngine()) as service:
        ticket = service.submit([request("a"), request("big", max_new_tokens=1000), request("b")])
        results, done = await service.collect(ticket, 3600.0)
        assert ([result.id for result in results], done) == (["a", "b"], False)
        with pytest.raises(PolicyError, match="refused request big"):
            await service.collect(ticket, 0.0)
        assert len(await service.generate([request("c")])) == 1


async def test_a_command_that_fails_is_its_senders_matter_alone():
    async with serving(FakeEngine()) as service:
        with pytest.raises(KeyError, match="table"):
            await service.between_steps(lambda engine: engine.load({}, PolicyVersion()))
        assert len(await service.generate([request("a")])) == 1


async def test_closing_fails_what_is_in_flight():
    engine = GatedEngine()
    async with serving(engine) as service:
        ticket = service.submit([request("a")])
        await asyncio.to_thread(engine.entered.wait, 5)
        command = asyncio.create_task(service.between_steps(lambda engine: None))
        collecting = asyncio.create_task(service.collect(ticket, 3600.0))
        await asyncio.sleep(0)
        await service.close()
        async with asyncio.timeout(5):
            outcomes = await asyncio.gather(command, collecting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [PolicyError, PolicyError]
        assert "closed while requests were in flight" in str(outcomes[1])
        with pytest.raises(PolicyError, match="closed"):
            service.submit([request("b")])


async def test_closing_tells_a_command_that_the_engine_is_at():
    entered, leave = threading.Event(), threading.Event()

    def hold(engine):
        entered.set()
        assert leave.wait(10)

    async with serving(FakeEngine()) as service:
        command = asyncio.create_task(service.between_steps(hold))
        await asyncio.to_thread(entered.wait, 5)
        await service.close()
        leave.set()
        async with asyncio.timeout(5):
            with pytest.raises(PolicyError, match="closed"):
                await command


async def test_a_caller_that_gives_up_leaves_the_service_running_and_no_task():
    engine = GatedEngine()
    async with serving(engine) as service:
        before = asyncio.all_tasks()
        callers = [
            asyncio.create_task(service.generate([request("a")])),
            asyncio.create_task(service.between_steps(lambda engine: None)),
        ]
        await asyncio.sleep(0.01)
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        assert asyncio.all_tasks() == before
        engine.let(1000)
        assert len(await service.generate([request("b")])) == 1


async def test_a_new_attempt_never_meets_an_unfinished_one_of_the_same_name():
    engine = GatedEngine()
    async with serving(engine) as service:
        first = service.submit([request("a", max_new_tokens=6)])
        engine.let(1)
        await until(lambda: engine.num_steps == 1)
        second = service.submit([request("a", max_new_tokens=2)])
        engine.let(50)
        for ticket, length in ((second, 2), (first, 6)):
            (result,), done = await service.collect(ticket, 3600.0)
            assert (result.id, result.completions.lengths.tolist(), done) == ("a", [length, length], True)


async def test_two_requests_of_one_submission_have_names_of_their_own():
    async with serving(FakeEngine()) as service:
        with pytest.raises(PolicyError, match="Two requests of one submission are called a"):
            service.submit([request("a"), request("a")])
        assert service.num_unfinished() == 0


async def test_an_engine_that_cannot_be_built_says_so():
    def build():
        raise PolicyError("no such model")

    service = RequestService(build)
    with pytest.raises(PolicyError, match="no such model"):
        await service.start()
    await service.close()


async def test_an_idle_service_does_not_step_the_engine():
    engine = FakeEngine()
    async with serving(engine) as service:
        await service.generate([request("a", max_new_tokens=3)])
        await service.between_steps(lambda engine: None)
        await asyncio.sleep(0.01)
        assert engine.num_steps == 3
