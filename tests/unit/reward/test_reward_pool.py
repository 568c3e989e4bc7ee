"""The pool of reward processes: a bad function harms its own call only, and no process outlives its parent."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_async.core.errors import ConfigError, RewardError, StallError
from forge_async.reward.pool import ProcessRewardPool
from forge_async.reward.ports import RewardCall
from forge_async.reward.worker import RewardWorker

USER = Path(__file__).with_name("user_rewards.py")


def calls(*completions, **data):
    return [RewardCall(prompt="1+1=", completion=completion, data=data) for completion in completions]


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_dead(pid, patience_s=5.0):
    deadline_s = time.monotonic() + patience_s
    while alive(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not alive(pid)


@contextlib.asynccontextmanager
async def pool_of(function, timeout_s=5.0, **options):
    """A started pool; at the end no process of it may be left."""
    pool = ProcessRewardPool(f"{USER}:{function}", timeout_s=timeout_s, **options)
    await pool.start()
    seen = set(pool.pids)
    try:
        yield pool
    finally:
        seen |= set(pool.pids)
        await pool.close()
        assert seen
        assert not any(map(alive, seen))


def values(outcomes):
    return [outcome.value for outcome in outcomes]


def kinds(outcomes):
    return [outcome.error and outcome.error.kind for outcome in outcomes]


async def test_outcomes_come_in_the_order_of_the_calls():
    async with pool_of("exact", num_workers=2) as pool:
        completions = [str(number % 3) for number in range(300)]
        assert values(await pool.score(calls(*completions, answer="2"))) == [float(c == "2") for c in completions]
        assert await pool.score([]) == []


@pytest.mark.parametrize(("num_workers", "begins"), [(1, [128, 22]), (2, [37, 28, 21, 16])])
async def test_a_lone_worker_is_given_all_and_several_less_and_less(num_workers, begins, monkeypatch):
    seen, score = [], RewardWorker.score

    async def noting(self, calls, answer):
        seen.append(len(calls))
        return await score(self, calls, answer)

    monkeypatch.setattr(RewardWorker, "score", noting)
    async with pool_of("exact", num_workers=num_workers) as pool:
        outcomes = await pool.score(calls(*map(str, range(150)), answer="2"))
    assert values(outcomes) == [float(number == 2) for number in range(150)]
    assert seen[: len(begins)] == begins and sum(seen) == 150


async def test_many_cheap_calls_cost_little():
    async with pool_of("exact") as pool:
        batch = calls(*["2"] * 512, answer="2")
        times_s = []
        for _ in range(7):
            started_s = time.perf_counter()
            await pool.score(batch)
            times_s.append(time.perf_counter() - started_s)
        assert min(times_s) < 0.05  # about 0.007 on an idle machine


async def test_several_callers_share_the_workers():
    async with pool_of("exact") as pool:
        answers = await asyncio.gather(*(pool.score(calls(str(n), answer="3")) for n in range(5)))
        assert [values(answer)[0] for answer in answers] == [0, 0, 0, 1, 0]


async def test_each_fault_belongs_to_its_own_call_and_the_rest_is_scored():
    completions = ["one", "raise", "true", "exit", "nan", "none", "text", "quit", "one", "segfault", "one"]
    async with pool_of("misbehave") as pool:
        outcomes = await pool.score(calls(*completions))
    expected = [None, "raised", None, "raised", *["not_a_number"] * 3, "died", None, "died", None]
    assert kinds(outcomes) == expected
    assert values(outcomes)[::2] == [1.0, 1.0, None, None, 1.0, 1.0]
    assert "ZeroDivisionError: division by zero" in outcomes[1].error.message
    assert "user_rewards.py" in outcomes[1].error.message  # the user's own lines
    assert "server.py" not in outcomes[1].error.message
    assert "exit code 7" in outcomes[7].error.message
    assert "SIGSEGV" in outcomes[9].error.message


async def test_faults_become_reward_errors_when_the_value_is_required():
    async with pool_of("misbehave") as pool:
        outcome, fault = await pool.score(calls("one", "none"))
    assert outcome.require() == 1.0
    with pytest.raises(RewardError, match="misbehave: it returned NoneType 'None'; return a finite float"):
        fault.require()


@pytest.mark.parametrize("how", ["sleep", "backtrack"])
async def test_a_hung_call_is_named_its_process_killed_and_the_rest_scored(how):
    async with pool_of("misbehave", timeout_s=0.2, slack_s=0.1) as pool:
        before = pool.pids
        outcomes = await pool.score(calls("one", "one", how, "one", "pid"))
        assert kinds(outcomes) == [None, None, "hung", None, None]
        assert f"did not answer in 0.2 s [prompt '1+1=', completion '{how}']" in outcomes[2].error.message
        assert wait_until_dead(before[0])
        assert pool.pids == [outcomes[4].value]


async def test_what_a_hung_call_started_ends_with_it(tmp_path):
    async with pool_of("misbehave", timeout_s=0.5, slack_s=0.1) as pool:
        outcomes = await pool.score(calls("spawn", pid_file=str(tmp_path / "pid")))
        assert kinds(outcomes) == ["hung"]
        assert wait_until_dead(int((tmp_path / "pid").read_text()))


async def test_user_prints_go_to_standard_error_and_corrupt_nothing(capfd):
    async with pool_of("misbehave") as pool:
        assert values(await pool.score(calls("say", "one", "read"))) == [1.0, 1.0, 0.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert "text on standard output" in err
    assert "past Python" in err


async def test_workers_run_maths_on_one_thread():
    async with pool_of("misbehave") as pool:
        assert values(await pool.score(calls("threads"))) == [1.0]


async def test_a_field_that_the_data_lacks_is_named():
    async with pool_of("exact") as pool:
        outcomes = await pool.score(calls("2", solution="2"))
    assert kinds(outcomes) == ["missing_data"]
    assert "needs answer, but this prompt's data has solution" in outcomes[0].error.message


async def test_async_functions_run_at_the_same_time_and_hang_alone():
    async with pool_of("slow", timeout_s=1.0) as pool:
        started_s = time.monotonic()
        outcomes = await pool.score(calls(*["ok"] * 30, "hang", "raise"))
        assert time.monotonic() - started_s < 2.5
    assert kinds(outcomes) == [*[None] * 30, "hung", "raised"]


async def test_an_async_function_that_blocks_is_found_by_asking_one_at_a_time():
    async with pool_of("slow", timeout_s=0.3, slack_s=0.1) as pool:
        assert kinds(await pool.score(calls("ok", "block", "ok"))) == [None, "hung", None]


async def test_a_cancelled_caller_leaves_the_pool_usable():
    async with pool_of("misbehave", timeout_s=60) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score(calls("one", "sleep")), 0.2)
        assert values(await pool.score(calls("one"))) == [1.0]


async def test_a_worker_that_died_while_idle_is_replaced_without_blame():
    async with pool_of("misbehave") as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGKILL)
        while pool.pids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert values(await pool.score(calls("one"))) == [1.0]


async def test_closing_ends_a_hung_worker_and_its_caller():
    async with pool_of("misbehave", timeout_s=60) as pool:
        caller = asyncio.create_task(pool.score(calls("sleep", "one")))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(RewardError, match="pool is closed"):
            await caller


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import nothing_like_this", ConfigError, "No module named 'nothing_like_this'"),
        ("import os; os._exit(4)", RewardError, r"took its worker process down \(exit code 4\) while loading"),
        ("import time; time.sleep(600)", StallError, "to load"),
    ],
)
async def test_a_function_that_cannot_be_loaded_fails_the_start_and_leaves_no_process(tmp_path, text, error, message):
    path = tmp_path / "bad.py"
    path.write_text(text)
    pool = ProcessRewardPool(f"{path}:score", num_workers=2, startup_timeout_s=1.0)
    with pytest.raises(error, match=message):
        await pool.start()
    assert pool.pids == []


PARENT = """
import asyncio, sys
from forge_async.reward.pool import ProcessRewardPool
from forge_async.reward.ports import RewardCall
async def main():
    pool = ProcessRewardPool(sys.argv[1], timeout_s=600)
    await pool.start()
    print(pool.pids[0], flush=True)
    await pool.score([RewardCall(prompt="", completion=sys.argv[2])])
asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["sleep", "backtrack"])
def test_a_hung_worker_dies_with_its_parent(how):
    command = [sys.executable, "-c", PARENT, f"{USER}:misbehave", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(0.2)
        assert alive(worker)
        parent.kill()
        assert wait_until_dead(worker)
