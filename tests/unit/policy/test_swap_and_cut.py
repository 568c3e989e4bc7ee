"""The request service around a pull, and the cut, on the fake engine."""

import asyncio
import dataclasses
import functools
import threading
import time

import pytest

from forge_async.core.errors import ConfigError, FingerprintError, PolicyError, WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.policy.concurrency import ConcurrencyLimit
from forge_async.policy.service import RequestService
from forge_async.policy.swap import MODES, swap_mode
from tests.fakes import TABLE, FakeEngine, bigram_table
from tests.serving import GatedEngine, added, calls, request, serving, until

pytestmark = pytest.mark.timeout(20)
NEW = PolicyVersion(step=9)


def tables(seed=1):
    import torch

    return {TABLE: torch.from_numpy(bigram_table(seed))}


async def pull(service, fetched=None, version=NEW):
    """A pull whose fetch ends when `fetched` is set."""
    async with service.pulling():
        if fetched is not None:
            await fetched.wait()
        return await service.swap(await service.prepare(tables(), version), version)


async def generating(service, engine, length=10):
    """A request that has made a few tokens."""
    ticket = service.submit([request("a", max_new_tokens=length)])
    engine.let(3)
    await until(lambda: engine.num_steps == 3)
    return ticket


async def only_result(service, ticket):
    (result,), done = await service.collect(ticket, 3600.0)
    assert done
    return result.completions


def runs(completions):
    versions = completions.versions
    return list(zip(versions.steps.tolist(), versions.lengths.tolist(), strict=True))


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="async.swap=stop is not one of keep_kv, recompute_kv"):
        swap_mode("stop")


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if not mode.holds])
async def test_generation_goes_on_while_a_version_is_fetched(mode):
    engine = GatedEngine()
    async with serving(engine, swap=mode) as service:
        ticket, fetched = await generating(service, engine), asyncio.Event()
        pulling = asyncio.create_task(pull(service, fetched))
        engine.let(2)
        await until(lambda: engine.num_steps == 5)
        late = service.submit([request("late", max_new_tokens=2)])
        engine.let(1)
        await until(lambda: added(engine) == ["a", "late"])
        fetched.set()
        await asyncio.sleep(0)
        engine.let(50)
        record = await pulling
        assert (record.mode, record.num_in_flight >= 2) == (mode, True)
        for length, each in ((10, ticket), (2, late)):
            assert (await only_result(service, each)).lengths.tolist() == [length, length]
        assert service.take_stats().swap_records == [record]


async def test_a_drain_finishes_what_is_in_flight_and_lets_nothing_new_in():
    engine = GatedEngine()
    async with serving(engine, swap="drain") as service:
        ticket = await generating(service, engine)
        pulling = asyncio.create_task(pull(service))
        await asyncio.sleep(0.01)
        late = service.submit([request("late", max_new_tokens=2)])
        engine.let(50)
        record = await pulling
        assert runs(await only_result(service, ticket)) == [(0, 20)]
        assert runs(await only_result(service, late)) == [(9, 4)]
        assert calls(engine, "load") == [9]
        entered = [call for call, _ in engine.log if call in ("add", "load")]
        assert entered == ["add", "load", "add"]
        assert (record.num_in_flight, record.discarded_tokens, record.recomputed_tokens) == (0, 0, 0)


async def test_a_drain_needs_no_stop_where_versions_stand_side_by_side():
    engine = GatedEngine()
    engine.versions_held = 2

    def reached(num_steps):
        return engine.num_steps >= num_steps

    async def step_until(condition):
        while not condition():
            following = engine.num_steps + 1
            engine.let(1)
            await until(functools.partial(reached, following))
            await asyncio.sleep(0.005)

    async with serving(engine, swap="drain") as service:
        first = await generating(service, engine, length=60)
        pulling = asyncio.create_task(pull(service))
        await step_until(pulling.done)
        second = service.submit([request("b", max_new_tokens=60)])
        await step_until(lambda: added(engine) == ["a", "b"])
        assert (calls(engine, "load"), pulling.result().num_in_flight) == ([9], 2)
        third = asyncio.create_task(pull(service, version=PolicyVersion(step=10)))
        late = service.submit([request("late", max_new_tokens=2)])
        await step_until(lambda: added(engine) == ["a", "b", "late"])
        await step_until(lambda: engine.num_steps == 50)
        assert not third.done(), "the first version has requests, the second is served: no third beside them yet"
        await step_until(third.done)
        assert engine.num_unfinished() == 1, "the second has not ended"
        engine.let(100)
        assert runs(await only_result(service, first)) == [(0, 120)]
        assert runs(await only_result(service, second)) == [(9, 120)]
        assert runs(await only_result(service, late)) == [(9, 4)]
        (result,) = await service.generate([request("c", max_new_tokens=2)])
        assert runs(result.completions) == [(10, 4)]


async def test_weights_that_cannot_stand_beside_others_are_drained_for():
    engine = GatedEngine()
    engine.versions_held, engine.keeps_apart = 2, lambda weights: False
    async with serving(engine, swap="drain") as service:
        ticket = await generating(service, engine)
        pulling = asyncio.create_task(pull(service))
        engine.let(2)
        await until(lambda: engine.num_steps == 5)
        late = service.submit([request("late", max_new_tokens=2)])
        engine.let(50)
        assert (await pulling).num_in_flight == 0
        assert runs(await only_result(service, ticket)) == [(0, 20)]
        assert runs(await only_result(service, late)) == [(9, 4)]


async def test_blocking_stops_when_the_pull_begins_and_the_pause_says_how_long():
    engine = GatedEngine()
    async with serving(engine, swap="blocking") as service:
        ticket, fetched = await generating(service, engine), asyncio.Event()
        engine.let(50)
        pulling = asyncio.create_task(pull(service, fetched))
        await asyncio.sleep(0.02)
        before = engine.num_steps
        assert await service.between_steps(lambda engine: engine.version.step) == 0, "commands are answered"
        await asyncio.sleep(0.1)
        assert engine.num_steps == before
        fetched.set()
        record = await pulling
        assert 0.1 <= record.pause_s < 5
        completions = await only_result(service, ticket)
        old = runs(completions)[0][1]
        assert runs(completions) == [(0, old), (9, 10 - old)] * 2
        assert record.recomputed_tokens == 2 * (3 + old)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.holds])
@pytest.mark.parametrize("how", ["fails", "hangs", "is refused"])
async def test_generation_goes_on_with_the_old_version_when_a_pull(mode, how):
    engine = GatedEngine()
    async with serving(engine, swap=mode) as service:
        ticket = await generating(service, engine)
        engine.let(50)

        async def bad_pull():
            async with service.pulling():
                if how == "fails":
                    raise WeightsError("retired")
                if how == "hangs":
                    await asyncio.Event().wait()
                await service.swap({TABLE: tables()[TABLE][:3]}, NEW)

        with pytest.raises((WeightsError, TimeoutError)):
            await asyncio.wait_for(bad_pull(), 0.2)
        assert runs(await only_result(service, ticket)) == [(0, 20)]
        assert (await pull(service)).mode == mode
        (result,) = await service.generate([request("b", max_new_tokens=2)])
        assert runs(result.completions) == [(9, 4)]


class PreparingEngine(GatedEngine):
    """Keeps its weights in a form of its own, and may find that they do not fit it."""

    def __init__(self):
        super().__init__()
        self.sealed, self.refuses, self.threads = frozenset([TABLE]), False, set()

    def prepare(self, weights, version):
        self.threads.add(threading.get_ident())
        if self.refuses:
            raise WeightsError("they do not fit")
        return super().prepare(weights, version)

    def step(self):
        self.stepping = threading.get_ident()
        return super().step()


async def test_an_engine_prepares_weights_beside_its_steps_and_a_refusal_leaves_it_as_it_was():
    engine = PreparingEngine()
    async with serving(engine) as service:
        ticket = await generating(service, engine)
        engine.refuses = True
        with pytest.raises(WeightsError, match="do not fit"):
            await pull(service)
        engine.refuses = False
        pulling = asyncio.create_task(pull(service))
        await until(lambda: ("prepare", NEW.step) in engine.log)
        engine.let(50)
        await pulling
        assert {step for step, _ in runs(await only_result(service, ticket))} == {0, NEW.step}
        assert engine.log.index(("prepare", NEW.step)) < engine.log.index(("load", NEW.step))
        assert engine.stepping not in engine.threads


class LingeringEngine(PreparingEngine):
    """Takes until the test lets it to prepare weights, or to load them."""

    def __init__(self, lingers):
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self._lingers = lingers

    def _linger(self, where):
        if where == self._lingers:
            self.begun.set()
            assert self.may_end.wait(10)

    def prepare(self, weights, version):
        self._linger("prepare")
        return super().prepare(weights, version)

    def load(self, weights, version, *, keep_kv=True):
        self._linger("load")
        return super().load(weights, version, keep_kv=keep_kv)


@pytest.mark.parametrize("where", ["prepare", "load"])
async def test_a_pull_that_is_called_off_lends_its_weights_until_nobody_reads_them(where):
    engine, given_back = LingeringEngine(where), asyncio.Event()
    engine.let(100)

    async def lent_pull():
        async with service.pulling():
            try:
                await service.swap(await service.prepare(tables(), NEW), NEW)
            finally:
                given_back.set()

    async with serving(engine) as service:
        pulling = asyncio.create_task(lent_pull())
        assert await asyncio.to_thread(engine.begun.wait, 10)
        pulling.cancel()
        await asyncio.wait({pulling}, timeout=0.05)
        assert not given_back.is_set()
        engine.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling
        assert calls(engine, where) == [NEW.step]
        assert (await pull(service, version=NEW.next())).num_in_flight == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gives_up", [False, True])
async def test_weights_that_do_not_stand_the_check_make_no_token(mode, gives_up):
    """Whether the puller hears of it or gave up meanwhile, and whatever its callers go on to ask for."""
    engine, checking, may_fail = GatedEngine(), threading.Event(), threading.Event()

    def check(engine):
        checking.set()
        assert may_fail.wait(10)
        raise FingerprintError("policy_0 pulled policy@0.9, but table.weight differs; it must not serve.")

    async def bad_pull():
        async with service.pulling():
            await service.swap(tables(), NEW, check)

    async with serving(engine, swap=mode) as service:
        await generating(service, engine)
        pulling = asyncio.create_task(bad_pull())
        engine.let(50)
        await until(checking.is_set)
        waiting = service.submit([request("waits")])
        if gives_up:
            pulling.cancel()
        may_fail.set()
        with pytest.raises(asyncio.CancelledError if gives_up else FingerprintError):
            await pulling
        with pytest.raises(FingerprintError, match="table.weight differs"):
            await service.collect(waiting, 3600.0)
        with pytest.raises(PolicyError, match="serves no more: policy_0 pulled policy@0.9, but table.weight differs"):
            await service.generate([request("b")])
        with pytest.raises(PolicyError, match="serves no more"):
            await service.between_steps(lambda engine: engine.version)
        with pytest.raises(PolicyError, match="serves no more"):
            await pull(service)
        log = [call for call, _ in engine.log]
        assert log[log.index("load") :] == ["load"]
        assert not service.take_stats().swaps


@pytest.mark.parametrize("mode", MODES)
async def test_weights_never_go_back(mode):
    """Not to an older step, and not to a dead incarnation; a new one may begin with an older step."""
    engine, restored = FakeEngine(), PolicyVersion(incarnation=1, step=4)
    async with serving(engine, swap=mode) as service:
        for version in (PolicyVersion(step=7), NEW, NEW, PolicyVersion(step=8), restored, PolicyVersion(step=99)):
            if version.precedes(engine.version):
                with pytest.raises(WeightsError, match=f"{version} is older than {engine.version}, which is served"):
                    await pull(service, version=version)
            else:
                await pull(service, version=version)
            (result,) = await service.generate([request("a", max_new_tokens=1, num_samples=1)])
            made = result.completions.versions
            assert (made.incarnations.tolist(), made.steps.tolist()) == (
                [engine.version.incarnation],
                [engine.version.step],
            )
        assert calls(engine, "load") == [7, 9, 9, 4]


async def test_a_drain_that_is_called_off_while_it_waits_does_not_swap_later():
    engine = GatedEngine()
    async with serving(engine, swap="drain") as service:
        ticket = await generating(service, engine)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pull(service), 0.05)
        engine.let(50)
        assert runs(await only_result(service, ticket)) == [(0, 20)]
        await asyncio.sleep(0.01)
        assert calls(engine, "load") == []


async def test_pulls_come_one_after_the_other():
    engine = FakeEngine()
    async with serving(engine, swap="drain") as service:
        inside = 0

        async def one(step):
            nonlocal inside
            async with service.pulling():
                inside += 1
                assert inside == 1
                await asyncio.sleep(0.005)
                await service.swap(tables(), PolicyVersion(step=step))
                inside -= 1

        await asyncio.gather(*(one(step) for step in (1, 2, 3)), service.generate([request("a")]))
        assert calls(engine, "load") == [1, 2, 3]


async def test_an_engine_that_fails_ends_the_wait_of_a_drain():
    engine = GatedEngine()
    engine.fail_at_step = 4
    async with serving(engine, swap="drain") as service:
        await generating(service, engine)
        pulling = asyncio.create_task(pull(service))
        await asyncio.sleep(0.01)
        engine.let(5)
        async with asyncio.timeout(5):
            with pytest.raises(PolicyError, match="out of memory"):
                await pulling


async def test_resumed_samples_carry_both_versions_and_all_their_tokens():
    engine = GatedEngine()
    async with serving(engine, swap="abort_resume") as service:
        ticket = service.submit([request("a", max_new_tokens=10), request("short", max_new_tokens=3)])
        engine.let(3)
        await until(lambda: engine.num_steps == 3)
        pulling = asyncio.create_task(pull(service))
        await asyncio.sleep(0.01)
        engine.let(50)
        record = await pulling
        found = {}
        done = False
        while not done:
            results, done = await service.collect(ticket, 3600.0)
            found |= {result.id: result.completions for result in results}
        old = runs(found["a"])[0][1]
        assert runs(found["a"]) == [(0, old), (9, 10 - old)] * 2
        assert record.recomputed_tokens == 2 * (3 + old)
        assert record.discarded_tokens == 0
        assert service.take_stats().tokens == 2 * 10 + 2 * 3


# Cutting off.


async def test_a_cut_returns_what_was_made_and_ends_the_ticket():
    engine = GatedEngine()
    async with serving(engine) as service:
        ticket = service.submit([request("done", max_new_tokens=2), request("a", max_new_tokens=20)])
        other = service.submit([request("a", max_new_tokens=8)])
        engine.let(3)
        await until(lambda: engine.num_steps == 3)
        collecting = asyncio.create_task(service.collect(other, 3600.0))
        cutting = asyncio.create_task(service.cut(ticket))
        await asyncio.sleep(0.01)
        engine.let(50)
        found = {result.id: result.completions for result in await cutting}
        assert {id: part.cut.tolist() for id, part in found.items()} == {"done": [False, False], "a": [True, True]}
        assert found["a"].lengths.tolist()[0] in (3, 4)
        assert await service.collect(ticket, 0.0) == ([], True)
        (result,), _ = await collecting
        assert (result.id, result.completions.lengths.tolist()) == ("a", [8, 8])
        assert await service.cut(ticket) == []


async def test_a_collect_that_waits_ends_when_its_ticket_is_cut():
    engine = GatedEngine()
    async with serving(engine) as service:
        ticket = await generating(service, engine)
        collecting = asyncio.create_task(service.collect(ticket, 3600.0))
        cutting = asyncio.create_task(service.cut(ticket))
        await asyncio.sleep(0.01)
        engine.let(50)
        assert len(await cutting) == 1
        assert await collecting == ([], True)


async def test_one_request_of_a_ticket_can_be_cut():
    engine = GatedEngine()
    async with serving(engine) as service:
        ticket = service.submit([request("a", max_new_tokens=9), request("b", max_new_tokens=4)])
        engine.let(2)
        await until(lambda: engine.num_steps == 2)
        cutting = asyncio.create_task(service.cut(ticket, ["a"]))
        await asyncio.sleep(0.01)
        engine.let(50)
        assert [result.id for result in await cutting] == ["a"]
        results, done = await service.collect(ticket, 3600.0)
        assert ([result.id for result in results], done) == (["b"], True)


async def test_what_never_entered_the_engine_is_cut_too():
    engine = GatedEngine()
    async with serving(engine, limit=ConcurrencyLimit(2, 2)) as service:
        first = await generating(service, engine, length=5)
        waiting = service.submit([request("w", num_samples=3)])
        cutting = asyncio.create_task(service.cut(waiting))
        await asyncio.sleep(0.01)
        engine.let(50)
        (result,) = await cutting
        assert (result.completions.lengths.tolist(), result.completions.cut.tolist()) == ([0] * 3, [True] * 3)
        assert (await only_result(service, first)).lengths.tolist() == [5, 5]
        assert added(engine) == ["a"]


async def test_a_prefix_is_gone_on_from_and_rows_that_are_complete_are_kept():
    async with serving(FakeEngine()) as service:
        (whole,) = await service.generate([request("a", max_new_tokens=6, seed=8)])
        ticket = service.submit([dataclasses.replace(request("a", max_new_tokens=9), prefix=whole.completions)])
        assert (await only_result(service, ticket)).token_ids.tolist() == whole.completions.token_ids.tolist()
        part = dataclasses.replace(whole.completions, cut=whole.completions.cut | [True, False])
        service.take_stats()
        (longer,) = await service.generate([dataclasses.replace(request("a", max_new_tokens=9), prefix=part)])
        assert longer.completions.lengths.tolist() == [9, 6]
        assert longer.completions.rows()[0][:6].tolist() == whole.completions.rows()[0].tolist()
        assert longer.completions.rows()[1].tolist() == whole.completions.rows()[1].tolist()
        assert longer.completions.cut.tolist() == [False, False]
        assert service.take_stats().tokens == 3


@pytest.mark.parametrize(("changes", "words"), [({"num_samples": 3}, "a prefix of 2"), ({}, "6 tokens of at most 6")])
async def test_a_prefix_that_does_not_fit_is_refused(changes, words):
    async with serving(FakeEngine()) as service:
        (whole,) = await service.generate([request("a", max_new_tokens=6)])
        prefix = dataclasses.replace(whole.completions, cut=~whole.completions.cut)
        with pytest.raises(PolicyError, match=f"refused request a: .*{words}"):
            await service.generate([dataclasses.replace(request("a", max_new_tokens=6, **changes), prefix=prefix)])
        assert len(await service.generate([request("b")])) == 1


# The limit.


async def test_the_engine_is_given_no_more_sequences_than_the_limit_in_order_of_arrival():
    engine, seen = FakeEngine(), []
    step = engine.step

    def watched():
        seen.append(engine.occupancy().num_running)
        return step()

    engine.step = watched
    async with serving(engine, limit=ConcurrencyLimit(4, 4)) as service:
        sizes = (2, 2, 1, 6, 1, 3, 4)
        ids = [f"r{number}" for number in range(len(sizes))]
        await service.generate([request(id, num_samples=size) for id, size in zip(ids, sizes, strict=True)])
        assert added(engine) == ids
        assert max(seen) == 6, "one that is larger than the limit runs alone"
        assert sorted(set(seen) - {6}) and max(set(seen) - {6}) <= 4
        state = await service.state()
        assert (state.limit_sequences, state.num_queued) == (4, 0)


async def test_without_a_limit_all_enter_before_the_first_step():
    engine = FakeEngine()
    async with serving(engine) as service:
        await service.generate([request(i, num_samples=8) for i in range(40)])
        assert [call for call, _ in engine.log[:41]] == ["add"] * 40 + ["step"]
        assert (await service.state()).limit_sequences == 0


async def test_a_service_that_was_not_started_says_so():
    service = RequestService(FakeEngine)
    with pytest.raises(PolicyError, match="was not started"):
        await service.between_steps(lambda engine: None)
    begun = time.monotonic()
    await service.close()
    assert time.monotonic() - begun < 5


async def test_urgent_requests_enter_before_those_that_wait():
    engine = GatedEngine()
    async with serving(engine, limit=ConcurrencyLimit(1, 1)) as service:
        for id, urgent in (("a", False), ("b", False), ("c", True), ("d", True)):
            service.submit([dataclasses.replace(request(id, max_new_tokens=2), urgent=urgent)])
        engine.let(20)
        await until(lambda: len(added(engine)) == 4)
        assert [id.partition("~")[0] for id in added(engine)] == ["c", "d", "a", "b"]
