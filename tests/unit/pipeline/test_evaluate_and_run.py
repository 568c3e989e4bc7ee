import asyncio
import io
import time

import pytest

from forge_async.core.errors import ForgeError, PolicyError, RewardError, unwrap
from forge_async.core.versions import PolicyVersion
from forge_async.observe.group_events import EventsLog
from forge_async.observe.progress import Progress
from forge_async.observe.rollout_log import RolloutLog
from forge_async.observe.sinks import JsonlSink, read_metrics
from forge_async.observe.trace import Tracer
from forge_async.pipeline.estimates import bootstrap, wilson
from forge_async.pipeline.evaluate import Evaluator
from forge_async.pipeline.recorder import Recorder
from forge_async.pipeline.ring import RingSettings
from forge_async.pipeline.run import Run
from forge_async.pipeline.run_state import STATE_FOLDER, RunState
from forge_async.pipeline.settings import CheckpointSettings, EvalSettings
from forge_async.policy.local import LocalPolicy
from forge_async.policy.ports import Sampling
from forge_async.policy.service import RequestService
from tests.fakes import (
    FakeEngine,
    FakeLearnerMesh,
    FakeRenderer,
    FakeReplay,
    FakeReplica,
    FakeRewards,
    FakeSource,
    FakeWorkers,
    eval_scores,
)

pytestmark = pytest.mark.timeout(30)


async def evaluated(rewards, num_prompts=3, sampling=None, **settings):
    service = RequestService(lambda: FakeEngine(version=PolicyVersion(step=4)))
    await service.start()
    try:
        evaluator = Evaluator(
            renderer=FakeRenderer(),
            scorer=rewards,
            sampling=Sampling(max_new_tokens=5, temperature=1.0, stop_token_ids=(2,), **sampling or {}),
            settings=EvalSettings(**settings),
            seed=0,
        )
        return await evaluator.evaluate(FakeSource().held_out(num_prompts), LocalPolicy(service), "eval before")
    finally:
        await service.close()


async def test_an_evaluation_is_greedy_and_tells_which_version_answered():
    rewards = FakeRewards(lambda prompt, completion: float(prompt != "p0"))
    found = await evaluated(rewards)
    assert (found.greedy, found.num_prompts) == (wilson(2, 3), 3)
    assert (found.oldest_version, found.newest_version) == (4, 4)
    assert (found.num_samples, found.sampled, found.pass_at) == (0, None, ())
    first = [call.completion for call in rewards.calls]
    again = FakeRewards()
    await evaluated(again)
    assert [call.completion for call in again.calls] == first
    assert all(1 <= len(completion) <= 5 for completion in first)


async def test_samples_give_pass_at_k_beside_the_greedy_answers():
    first = FakeRewards()
    await evaluated(first)
    scores = iter([1.0] * 3 + [1.0, 0.0, 0.0, 0.0] + [0.0] * 4 + [1.0, 1.0, 0.5, 0.0])
    rewards = FakeRewards(lambda prompt, completion: next(scores))
    found = await evaluated(rewards, samples=4, k=[2, 1])
    assert found.greedy == wilson(3, 3)
    assert [call.completion for call in rewards.calls[:3]] == [call.completion for call in first.calls], "still greedy"
    assert len({call.completion for call in rewards.calls[3:]}) > 3, "samples differ"
    assert [each.k for each in found.pass_at] == [1, 2]
    assert found.pass_at[0].estimate == bootstrap([1 / 4, 0, 2 / 4], 0)
    assert found.pass_at[1].estimate == bootstrap([1 / 2, 0, 5 / 6], 0)
    assert (found.num_samples, found.sampled) == (4, bootstrap([1 / 4, 0, 2.5 / 4], 0)), "0.5 is not solved"


async def test_samples_are_drawn_as_in_training_but_no_kept_sets_are_asked_for():
    asked = []

    class Policy:
        async def submit(self, ticket, requests, linger_s):
            asked.extend(requests)
            raise PolicyError("that was all")

    evaluator = Evaluator(
        renderer=FakeRenderer(),
        scorer=FakeRewards(),
        sampling=Sampling(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=4),
        settings=EvalSettings(samples=3),
        seed=0,
    )
    with pytest.raises(PolicyError, match="that was all"):
        await evaluator.evaluate(FakeSource().held_out(2), Policy(), "eval")
    sampled = [request.sampling for request in asked if request.num_samples == 3]
    assert len(sampled) == 2
    assert all((each.temperature, each.top_p, each.top_k) == (0.7, 0.9, 4) for each in sampled)
    assert not any(request.sampling.records_kept_sets for request in asked)


@pytest.mark.parametrize(("samples", "k", "ks"), [(1, [], ()), (8, [], (1, 8)), (8, [4, 2, 4], (2, 4))])
def test_which_pass_at_k_are_told(samples, k, ks):
    assert EvalSettings(samples=samples, k=k).ks == ks


async def test_an_evaluation_leaves_nothing_out_but_ends_at_stop_strings():
    plain, narrow, stopped = FakeRewards(), FakeRewards(), FakeRewards()
    await evaluated(plain)
    await evaluated(narrow, sampling={"top_p": 0.5, "top_k": 2})
    assert [call.completion for call in narrow.calls] == [call.completion for call in plain.calls]
    first = plain.calls[0].completion
    await evaluated(stopped, sampling={"stop_strings": (first[:2],)})
    assert len(first) > 2 and stopped.calls[0].completion == first[:2] and not stopped.calls[0].truncated


async def test_a_reward_that_fails_on_a_held_out_prompt_is_named():
    def score(prompt, completion):
        raise ValueError("bad")

    with pytest.raises(RewardError, match="'p0': bad"):
        await evaluated(FakeRewards(score))


def make_run(
    folder, *, num_steps=4, every_steps=0, save_every=None, keep=2, keep_best=True, num_prompts=2, evaluate_beside=True,
    resumed=None,
):  # fmt: skip
    version = PolicyVersion(incarnation=1, step=resumed.step) if resumed else PolicyVersion()
    replay = FakeReplay(2, 1, first_step=version.step)
    learner = FakeLearnerMesh(replay, version=version)
    replicas = [FakeReplica("policy_0", learner)]
    workers = FakeWorkers(replay, replicas)
    recorder = Recorder(
        begun_s=0.0,
        sink=JsonlSink(folder / "metrics.jsonl"),
        events=EventsLog(folder / "events.jsonl"),
        rollouts=RolloutLog(folder / "rollouts.jsonl.zst"),
        rollouts_per_step=1,
        tracer=Tracer(folder / "trace.json"),
        progress=Progress(total_steps=num_steps, mode="off", stream=io.StringIO()),
        replicas=replicas,
        workers=workers,
    )
    run = Run(
        replay=replay,
        learner=learner,
        replicas=replicas,
        workers=workers,
        recorder=recorder,
        ring=RingSettings(num_steps=num_steps, groups_per_step=2, publish_every=1),
        evaluation=EvalSettings(every_steps=every_steps, num_prompts=num_prompts),
        checkpoint=CheckpointSettings(
            every_steps=every_steps if save_every is None else save_every, keep=keep, keep_best=keep_best
        ),
        keep_versions=1,
        checkpoints_folder=folder / "checkpoints",
        evaluate_beside=evaluate_beside,
        begun_s=time.time() - 100.0,
        resumed=resumed,
    )
    return run, workers


async def test_a_run_evaluates_trains_records_and_saves(tmp_path):
    run, _ = make_run(tmp_path)
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    assert (run.result.eval_before, run.result.eval_after) == (0.25, 0.25)
    assert run.result.weights_sha256 == "0" * 64
    assert run.result.checkpoint == tmp_path / "checkpoints" / "step-000004"
    assert run.result.checkpoint.is_dir()
    assert run.result.groups is not None
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


async def test_checkpoints_and_evaluations_on_the_way(tmp_path):
    run, _ = make_run(tmp_path, every_steps=1, keep=2, keep_best=False)
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]
    assert [found["step"] for found in run.result.evaluations] == [0, 1, 2, 3, 4]
    assert 0.25 in [row.get("eval/score") for row in read_metrics(tmp_path / "metrics.jsonl")]


@pytest.mark.parametrize("beside", [True, False])
async def test_steps_go_on_during_an_evaluation_unless_it_must_be_alone(tmp_path, beside):
    run, workers = make_run(tmp_path, num_steps=6, every_steps=2, evaluate_beside=beside)
    version = await run.prepare()
    asked, seen, release = [], [], asyncio.Event()

    async def slow(num_prompts, replica, name):
        asked.append(name)
        if name == "eval 2":
            await release.wait()
            seen.append(len(workers.made))
        return eval_scores(0.5, (2, 3))

    workers.evaluate = slow
    training = asyncio.create_task(run.train(version))
    async with asyncio.timeout(20):
        while "eval 2" not in asked or (beside and len(workers.made) < 12):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        if not beside:
            assert not training.done()
            assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
        release.set()
        await training
    assert asked == ["eval 2", "eval 4", "eval 6"], "one after the other, and those on their way end"
    assert [(found["step"], found["newest_version"]) for found in run.result.evaluations[1:]] == [
        (2, 3),
        (4, 3),
        (6, 3),
    ]


async def test_the_checkpoint_where_the_best_evaluation_began_is_kept(tmp_path):
    run, workers = make_run(tmp_path, num_steps=6, every_steps=1, keep=1)
    scores = {"eval 2": 0.9, "eval 4": 0.9}

    async def scored(num_prompts, replica, name):
        return eval_scores(1.0 if name == "eval 0" else scores.get(name, 0.5))

    workers.evaluate = scored
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000002", "step-000006"]
    assert run.result.best_checkpoint == folder / "step-000002", "the model that the run began with has no checkpoint"
    assert (folder / "best").resolve() == folder / "step-000002"


async def test_a_checkpoint_stays_while_its_evaluation_is_on_its_way(tmp_path):
    run, workers = make_run(tmp_path, num_steps=6, every_steps=1, keep=1)
    release = asyncio.Event()

    async def slow(num_prompts, replica, name):
        if name == "eval 1":
            await release.wait()
        return eval_scores(0.9 if name == "eval 1" else 0.1)

    workers.evaluate = slow
    training = asyncio.create_task(run.train(await run.prepare()))
    async with asyncio.timeout(20):
        while not (tmp_path / "checkpoints" / "step-000005").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert (tmp_path / "checkpoints" / "step-000001").exists()
        release.set()
        await training
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-000001", "step-000006"]
    assert [found["step"] for found in run.result.evaluations] == [0, 1, 2, 3, 4, 5, 6]


async def test_a_checkpoint_holds_what_the_run_goes_on_with(tmp_path):
    run, workers = make_run(tmp_path, num_steps=6, every_steps=2, keep=2)
    scores = iter([0.1, 0.8, 0.3, 0.2, 0.2])

    async def score(num_prompts, replica, name):
        return eval_scores(next(scores))

    workers.evaluate = score
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    folder = tmp_path / "checkpoints"
    state = RunState.read(folder / "step-000006")
    assert (state.step, state.eval_before, state.best_step, state.best_score) == (6, 0.1, 2, 0.8)
    assert [found["step"] for found in state.evaluations] == [0, 2, 4], "the last one came after it"
    assert 100 < state.wall_s < 130
    assert (folder / "step-000006" / STATE_FOLDER).is_dir()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 6


async def test_a_resumed_run_does_the_steps_that_are_left_and_remembers_what_was(tmp_path):
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    evaluations = ({"step": 0, "score": 0.1}, {"step": 2, "score": 0.8})
    earlier = RunState(step=4, wall_s=9, eval_before=0.1, evaluations=evaluations, best_step=2, best_score=0.8)
    run, workers = make_run(tmp_path, num_steps=6, every_steps=2, keep=1, resumed=earlier)
    asked = []

    async def score(num_prompts, replica, name):
        asked.append(name)
        return eval_scores(0.3)

    workers.evaluate = score
    async with asyncio.timeout(20):
        version = await run.prepare()
        assert version == PolicyVersion(incarnation=1, step=4)
        await run.train(version)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [5, 6]
    assert asked == ["eval 4", "eval 6"], "the evaluation after step 4 had not ended with its checkpoint"
    assert run.result.eval_before == 0.1 and run.result.eval_after == 0.3
    assert [found["step"] for found in run.result.evaluations] == [0, 2, 4, 6]
    assert run.result.best_checkpoint == tmp_path / "checkpoints" / "step-000002"
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert kept == ["step-000002", "step-000006"], "the best one is known from before"


@pytest.mark.parametrize("text", ["", "{", '{"schema": 1, "step": 2}', '{"schema": 2, "step": 2, "wall_s": 1}'])
def test_a_damaged_run_state_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ForgeError, match=r"run\.json"):
        RunState.read(tmp_path)


async def test_without_keep_best_evaluations_write_no_checkpoints(tmp_path):
    run, _ = make_run(tmp_path, every_steps=1, save_every=0, keep_best=False)
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000004"]
    assert run.result.best_checkpoint is None


async def test_an_evaluation_that_fails_ends_the_run(tmp_path):
    run, workers = make_run(tmp_path, every_steps=2)
    version = await run.prepare()

    async def fail(*_):
        raise RewardError("The reward of 'p0': bad.")

    workers.evaluate = fail
    with pytest.raises(ExceptionGroup) as caught:
        await run.train(version)
    assert "bad" in str(unwrap(caught.value))


async def test_no_held_out_prompts_means_no_evaluation(tmp_path):
    run, workers = make_run(tmp_path, num_prompts=0)

    async def never(*_):
        raise AssertionError("evaluated")

    workers.evaluate = never
    async with asyncio.timeout(20):
        await run.train(await run.prepare())
    assert run.result.eval_before is None
    assert run.result.eval_after is None
