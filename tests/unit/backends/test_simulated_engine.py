"""The simulated engine: time, versions and the cost of each way to swap weights."""

import asyncio

import numpy as np
import pytest

from forge_async.backends.simulated.engine import SimulatedEngine
from forge_async.backends.simulated.replica import SimulatedReplica
from forge_async.backends.simulated.times import EngineTimes, LogNormalLengths
from forge_async.backends.simulated.virtual_time import LoopClock, run_virtually
from forge_async.core.errors import PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.collecting import new_ticket
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.replay.settings import SWAP_MODES

NEXT = PolicyVersion(step=1)
PROMPT_TOKENS = 5


def request(id="0", num_samples=1, max_new_tokens=1000):
    return GenerationRequest(
        id=id, prompt_token_ids=np.zeros(PROMPT_TOKENS, np.int32), num_samples=num_samples, seed=0,
        sampling=Sampling(max_new_tokens=max_new_tokens),
    )  # fmt: skip


async def started(lengths, swap="keep_kv", **times):
    """A replica that answers request i with completions of lengths[i]; a token takes 1 s however many run."""
    plain = {"full_token_s": 1.0, "fixed_share": 1.0, "max_sequences": 4}
    replica = SimulatedReplica(
        "policy_0",
        times=EngineTimes(**plain | times),
        lengths_of=lambda request: np.array(lengths[int(request.id)], dtype=np.int32),
        swap=swap,
        clock=LoopClock(),
    )
    await replica.start()
    return replica


async def answers(replica, *ids, lengths):
    """(id, version runs, time) of each request as it finishes."""
    ticket, found = new_ticket(), []
    results, done = await replica.submit(ticket, [request(id, len(lengths[int(id)])) for id in ids], 0.0)
    while results:
        runs = [result.completions.versions for result in results]
        found += [
            (result.id, [*zip(one.lengths.tolist(), one.steps.tolist(), strict=True)], LoopClock().now_s())
            for result, one in zip(results, runs, strict=True)
        ]
        results, done = ([], True) if done else await replica.collect(ticket, 0.0)
    return found


def test_a_rollout_of_l_tokens_takes_l_token_times_and_a_group_as_long_as_its_longest():
    async def scenario():
        lengths = [[3, 7], [4]]
        replica = await started(lengths)
        found = await answers(replica, "0", "1", lengths=lengths)
        assert [(id, round(at, 3)) for id, _, at in found] == [("1", 4.0), ("0", 7.0)]
        assert replica.engine.made_tokens == 14
        assert replica.engine.busy_s == pytest.approx(7.0)
        await replica.close()

    run_virtually(scenario())


def test_load_stretches_the_token_time():
    async def scenario():
        lengths = [[4], [2]]
        replica = await started(lengths, fixed_share=0.0, max_sequences=2)
        found = await answers(replica, "0", "1", lengths=lengths)
        assert [(id, round(at, 3)) for id, _, at in found] == [("1", 2.0), ("0", 3.0)], "alone it is twice as fast"
        await replica.close()

    run_virtually(scenario())


def test_rollouts_beyond_the_slots_wait_their_turn():
    async def scenario():
        lengths = [[2], [5], [1]]
        replica = await started(lengths, max_sequences=2)
        found = await answers(replica, "0", "1", "2", lengths=lengths)
        assert [(id, round(at, 3)) for id, _, at in found] == [("0", 2.0), ("2", 3.0), ("1", 5.0)]
        await replica.close()

    run_virtually(scenario())


EXPECTED = {
    # swap: (runs of a rollout of 6 tokens that had 2 when the weights were asked for and 3 when they were fetched,
    #        its end, pause, discarded, recomputed); fetching takes 1 s, swapping 0.5, a token's prefill 0.1, a
    #        resubmission 0.25
    "keep_kv": ([(3, 0), (3, 1)], 6.5, 0.5, 0, 0),
    "recompute_kv": ([(3, 0), (3, 1)], 7.3, 1.3, 0, 8),
    "abort_resume": ([(3, 0), (3, 1)], 7.55, 1.55, 0, 8),
    "abort_retry": ([(6, 1)], 10.25, 1.25, 3, 5),
    "drain": ([(6, 0)], 6.0, 0.5, 0, 0),
    "blocking": ([(2, 0), (4, 1)], 8.2, 2.2, 0, 7),
}


@pytest.mark.parametrize("swap", SWAP_MODES)
def test_each_swap_has_its_cost_and_stamps_the_right_versions(swap):
    async def scenario():
        lengths = [[6]]
        replica = await started(lengths, swap, fetch_s=1.0, swap_s=0.5, prefill_token_s=0.1, resubmit_s=0.25)
        making = asyncio.create_task(answers(replica, "0", lengths=lengths))
        await asyncio.sleep(2.0)
        pull = await replica.pull(NEXT)
        ((_, runs, ended_s),) = await making
        cost = replica.engine.cost
        assert (runs, round(ended_s, 6), round(pull.pause_s, 6), cost.discarded_tokens, cost.recomputed_tokens) == (
            EXPECTED[swap]
        )
        assert pull.pause_s == cost.pause_s
        assert replica.engine.version == NEXT
        await replica.close()

    run_virtually(scenario())


def test_every_swap_has_an_expectation():
    assert set(EXPECTED) == set(SWAP_MODES)


def test_draining_lets_nothing_start_and_ends_with_the_last_rollout():
    async def scenario():
        lengths = [[6], [2]]
        replica = await started(lengths, "drain", fetch_s=1.0)
        first = asyncio.create_task(answers(replica, "0", lengths=lengths))
        await asyncio.sleep(0.0)
        pulling = asyncio.create_task(replica.pull(NEXT))
        await asyncio.sleep(3.0)
        ((_, runs, ended_s),) = await answers(replica, "1", lengths=lengths)
        assert (runs, round(ended_s, 3)) == ([(2, 1)], 8.0)
        await pulling
        await first
        await replica.close()

    run_virtually(scenario())


def test_versions_of_many_swaps_add_up_to_the_rollout():
    async def scenario():
        lengths = [[40], [3, 30]]
        replica = await started(lengths, fixed_share=0.3)

        async def pull():
            for step in range(1, 9):
                await asyncio.sleep(1.7)
                await replica.pull(PolicyVersion(step=step))

        pulling = asyncio.create_task(pull())
        found = {id: runs for id, runs, _ in await answers(replica, "0", "1", lengths=lengths)}
        await pulling
        assert sum(tokens for tokens, _ in found["0"]) == 40
        steps = [step for _, step in found["0"]]
        assert steps == sorted(steps) and steps[0] == 0 and steps[-1] == 8
        assert sum(tokens for tokens, _ in found["1"]) == 33
        await replica.close()

    run_virtually(scenario())


def test_an_engine_that_fails_is_heard_of():
    async def scenario():
        lengths = [[3]]
        replica = await started(lengths)
        replica.engine._times = None
        with pytest.raises(AttributeError):
            await replica.submit("8", [request("0")], 0.0)
        with pytest.raises(PolicyError, match="no ticket 9"):
            await replica.collect("9", 0.0)
        await replica.close()

    run_virtually(scenario())


def test_lengths_are_long_tailed_and_the_same_for_the_same_request():
    lengths_of = LogNormalLengths(mean_tokens=100, sigma=1.0, seed=3)
    drawn = lengths_of(request("5", 20_000, max_new_tokens=10**6))
    assert drawn.mean() == pytest.approx(100, rel=0.05)
    assert drawn.max() > 1000
    assert np.median(drawn) == pytest.approx(100 * np.exp(-0.5), rel=0.05)
    assert (drawn == lengths_of(request("5", 20_000, max_new_tokens=10**6))).all()
    cut = lengths_of(request("5", 20_000, max_new_tokens=50))
    assert (cut == np.minimum(drawn, 50)).all()


def test_an_idle_engine_costs_nothing():
    async def scenario():
        engine = SimulatedEngine(EngineTimes(), LoopClock(), PolicyVersion())
        serving = asyncio.create_task(engine.serve())
        await asyncio.sleep(100.0)
        assert (engine.busy_s, engine.num_unfinished(), engine.fill()) == (0.0, 0, 0.0)
        serving.cancel()

    run_virtually(scenario())


def test_a_cut_ends_rollouts_as_far_as_they_came_and_lets_the_queue_move_up():
    async def scenario():
        replica = await started([[3, 100, 100], [50, 50, 50]], max_sequences=4)
        waiting = asyncio.create_task(replica.submit("a", [request("0", 3)], 0.0))
        other = asyncio.create_task(replica.submit("b", [request("1", 3)], 0.0))
        await asyncio.sleep(10.0)
        (result,) = await replica.cut("a")
        assert await waiting == ([], True)
        assert result.completions.lengths.tolist() == [3, 10, 10]
        assert result.completions.cut.tolist() == [False, True, True]
        assert len(result.completions.token_ids) == result.completions.versions.num_tokens == 23
        begun_s = asyncio.get_running_loop().time()
        await other
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(50.0, abs=1.0), "two began at the cut"
        await replica.close()

    run_virtually(scenario())
