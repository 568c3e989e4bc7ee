import asyncio

import numpy as np
import pytest

from forge_async.core.errors import PolicyError, RequestRefusedError, RewardError, StallError
from forge_async.core.records import Completions, PromptId
from forge_async.core.rng import request_seed
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.pipeline.make_groups import GroupMaker
from forge_async.policy.local import LocalPolicy
from forge_async.policy.ports import GenerationResult, Sampling
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.oversize import SampleLimit
from forge_async.rollout.settings import RolloutSettings
from tests.fakes import FakeAdmission, FakeEngine, FakeRenderer, FakeRewards, FakeSource
from tests.serving import added, serving

GROUP_SIZE = 3
STOP = 2


class FakePolicy:
    """Answers request i with `answers[i]` texts, in the order `batches` of positions.

    A text that ends with "..." is never finished: it is there when the request is cut.
    """

    def __init__(self, answers, batches=None, refuses=(), kept_set=None):
        self.answers, self.requests, self.refuses, self.kept_set = answers, [], refuses, kept_set
        wanted = [at for at, texts in enumerate(answers) if at not in refuses and not self._endless(texts)]
        self.batches = list(batches or ([wanted] if wanted else []))

    async def submit(self, ticket, requests, linger_s):
        self.requests += requests
        self.ticket, self.num_collects, self.released = ticket, 0, asyncio.Event()
        return await self.collect(ticket, linger_s)

    async def collect(self, ticket, linger_s):
        assert ticket == self.ticket
        self.num_collects += 1
        await asyncio.sleep(0)
        if self.batches:
            batch = self.batches.pop(0)
            left = bool(self.batches or self.refuses or any(map(self._endless, self.answers)))
            return [self._result(self.requests[at], self.answers[at]) for at in batch], not left
        if self.refuses:
            raise RequestRefusedError("too long")
        await self.released.wait()
        return [], True

    async def cut(self, ticket):
        assert ticket == self.ticket
        self.released.set()
        endless = [at for at, texts in enumerate(self.answers) if self._endless(texts)]
        return [self._result(self.requests[at], self.answers[at]) for at in endless]

    @staticmethod
    def _endless(texts):
        return any(text.endswith("...") for text in texts)

    def _result(self, request, texts):
        cut = [text.endswith("...") for text in texts]
        tokens = [
            [*FakeRenderer().encode(text.removesuffix("...")).tolist(), *([] if is_cut else [STOP])]
            for text, is_cut in zip(texts, cut, strict=True)
        ]
        flat = [token for row in tokens for token in row]
        return GenerationResult(
            id=request.id,
            completions=Completions(
                lengths=np.array([len(row) for row in tokens], dtype=np.int32),
                token_ids=np.array(flat, dtype=np.int32),
                logprobs=np.full(len(flat), -1.0, dtype=np.float32),
                versions=VersionRuns.uniform(len(flat), PolicyVersion(step=6)),
                truncated=np.zeros(len(tokens), dtype=bool),
                cut=np.array(cut),
                kept_set=self.kept_set,
            ),
        )


class SilentPolicy(FakePolicy):
    async def collect(self, ticket, linger_s):
        await asyncio.Event().wait()

    async def cut(self, ticket):
        await asyncio.Event().wait()


def admissions(*indices):
    return [
        FakeAdmission(index=i, prompt_id=PromptId(source="fake", epoch=0, index=i % 10), attempt=1) for i in indices
    ]


def maker(
    rewards=None,
    *,
    zero_variance="refill",
    timeout_s=5.0,
    group_timeout_s=9.0,
    min_rollouts=2,
    limit=None,
    reference=None,
    **advantage,
):
    return GroupMaker(
        source=FakeSource(),
        renderer=FakeRenderer(),
        rewards=rewards or FakeRewards(),
        sampling=Sampling(max_new_tokens=9, stop_token_ids=(STOP,)),
        group_size=GROUP_SIZE,
        run_seed=11,
        advantage=AdvantageSettings(zero_variance=zero_variance, **advantage),
        rollout=RolloutSettings(timeout_s=timeout_s, group_timeout_s=group_timeout_s, min_rollouts=min_rollouts),
        limit=limit,
        reference=reference,
    )


async def make(maker, indices, policy):
    return [batch async for batch in maker.make(admissions(*indices), policy)]


async def test_requests_go_out_together_in_order_of_admission_with_seeds_of_their_own():
    policy = FakePolicy([["a", "bb", "c"]] * 3)
    await make(maker(), [12, 13, 14], policy)
    assert [request.id for request in policy.requests] == ["12", "13", "14"]
    assert [request.seed for request in policy.requests] == [request_seed(11, index, 0) for index in (12, 13, 14)]
    assert {request.num_samples for request in policy.requests} == {GROUP_SIZE}
    assert policy.requests[1].prompt_token_ids.tolist() == FakeRenderer().render("p3").tolist()


async def test_groups_leave_in_the_batches_in_which_they_finished():
    policy = FakePolicy([["a", "bb", "c"]] * 4, batches=[[2], [0, 3], [1]])
    batches = await make(maker(), [5, 6, 7, 8], policy)
    assert [[made.group.index for made in batch] for batch in batches] == [[7], [5, 8], [6]]


async def test_what_finishes_together_takes_one_call_and_tickets_differ():
    policies = [FakePolicy([["a", "bb", "c"]] * 4) for _ in range(2)]
    for policy in policies:
        await make(maker(), [5, 6, 7, 8], policy)
        assert policy.num_collects == 1, "that of the submission"
    assert policies[0].ticket != policies[1].ticket


async def test_a_submission_that_has_not_arrived_at_its_deadline_is_cut_when_it_does():
    """The policy answers late: what it is told to cut, it does not know yet."""
    engine, arrives = FakeEngine(), asyncio.Event()
    async with serving(engine) as service:

        class LatePolicy(LocalPolicy):
            async def submit(self, ticket, requests, linger_s):
                await arrives.wait()
                return await super().submit(ticket, requests, linger_s)

            async def cut(self, ticket, ids=None):
                made = await super().cut(ticket, ids)
                arrives.set()
                return made

        ((first, second),) = await make(maker(timeout_s=0.02), [3, 4], LatePolicy(service))
        assert service.num_unfinished() == 0 and not added(engine)
    assert [(lost.admission.index, lost.reason) for lost in (first, second)] == [
        (3, "rollout_timeout"), (4, "rollout_timeout")
    ]  # fmt: skip


async def test_groups_are_told_when_their_tokens_are_made_before_they_are_scored():
    told, rewards = [], FakeRewards()

    async def generated(tries):
        told.append((tries, len(rewards.calls)))

    policy = FakePolicy([["a", "bb", "c"]] * 3, batches=[[2], [0, 1]])
    batches = [batch async for batch in maker(rewards).make(admissions(5, 6, 7), policy, generated)]
    assert [len(batch) for batch in batches] == [1, 2]
    assert told == [([(7, 1)], 0), ([(5, 1), (6, 1)], GROUP_SIZE)]


async def test_a_made_group_carries_rewards_advantages_and_what_people_read():
    rewards = FakeRewards()
    ((made,),) = await make(maker(rewards), [4], FakePolicy([["a", "bbb", "bb"]]))
    group = made.group
    assert (group.index, group.prompt_id.index, made.admission.attempt) == (4, 4, 1)
    assert group.rewards.tolist() == [1, 3, 2]
    assert made.completions == ("a", "bbb", "bb"), "decoded without the stop token"
    assert [call.data for call in rewards.calls] == [{"answer": 4}] * 3
    assert made.prompt_text == "p4"
    assert made.num_tokens == 2 + 4 + 3
    assert made.outcome == ""
    assert group.oldest_step() == 6
    sampled = group.samples.advantages[group.samples.loss_mask]
    assert (np.sign(sampled) == [-1] * 2 + [1] * 4 + [0] * 3).all()
    assert sum(group.samples.advantages[group.samples.bounds()[1:] - 1]) == pytest.approx(0, abs=1e-6)
    assert made.generated_s <= made.scored_s


async def test_an_empty_completion_is_scored_as_such_and_its_end_token_trained_on():
    rewards = FakeRewards()
    ((made,),) = await make(maker(rewards), [4], FakePolicy([["", "bbb", "bb"]]))
    assert [call.completion for call in rewards.calls] == ["", "bbb", "bb"]
    samples, num_prompt = made.group.samples, len(FakeRenderer().render("p4"))
    assert samples.lengths.tolist() == [num_prompt + 1, num_prompt + 4, num_prompt + 3]
    assert samples.token_ids[num_prompt] == STOP and samples.loss_mask[num_prompt]
    assert samples.advantages[num_prompt] < 0


@pytest.mark.parametrize(("zero_variance", "outcome"), [("refill", "filtered"), ("keep", "")])
async def test_a_group_of_equal_rewards_is_filtered_if_the_settings_refill(zero_variance, outcome):
    batches = await make(maker(zero_variance=zero_variance), [0, 1], FakePolicy([["a", "b", "c"], ["a", "bb", "c"]]))
    assert [made.outcome for made in batches[0]] == [outcome, ""]
    assert not batches[0][0].group.samples.advantages.any()


async def test_the_penalty_for_length_makes_equal_rewards_differ_and_is_not_recorded_as_reward():
    rewards = FakeRewards(lambda prompt, completion: 1.0)
    policy = FakePolicy([["a", "bbbbb", "bbbbbbbb"]])
    ((made,),) = await make(maker(rewards, overlong_tokens=6, scale="none"), [0], policy)
    assert made.outcome == ""
    assert made.group.rewards.tolist() == [1, 1, 1]
    # Lengths with the stop token 2, 6 and 9 of a limit of 9: penalties 0, 0.5 and 1.
    at_the_end = made.group.samples.advantages[made.group.samples.bounds()[1:] - 1]
    assert at_the_end == pytest.approx([0.5, 0.0, -0.5])


async def test_a_reward_that_fails_ends_the_work_naming_the_prompt():
    def score(prompt, completion):
        if prompt == "p3":
            raise ValueError("no answer field")
        return float(len(completion))

    with pytest.raises(RewardError, match="The reward of 'p3': no answer field"):
        await make(maker(FakeRewards(score)), [2, 3], FakePolicy([["a", "bb", "c"]] * 2))


async def test_a_silent_policy_is_named_after_the_deadline(monkeypatch):
    monkeypatch.setattr("forge_async.pipeline.collecting.CUT_TIMEOUT_S", 0.02)
    with pytest.raises(StallError, match=r"rollout worker waited 0.02 s for overdue rollouts to be cut off from the p"):
        await make(maker(timeout_s=0.02), [3, 4], SilentPolicy([["a", "b", "c"]] * 2))


async def test_a_rollout_that_never_ends_is_cut_off_and_its_siblings_are_each_other_s_baseline():
    a_maker = maker(timeout_s=0.05)
    batches = await make(a_maker, [3, 4], FakePolicy([["a", "bbb", "c..."], ["a", "bb", "ccc"]]))
    assert [[made.group.index for made in batch] for batch in batches] == [[4], [3]], "nobody waits for the straggler"
    group = batches[1][0].group
    assert group.rewards.tolist() == [1, 3]
    assert len(group.samples) == 2
    ends = group.samples.bounds()[1:] - 1
    assert np.sign(group.samples.advantages[ends]).tolist() == [-1, 1]
    stats = a_maker.take_stats()
    assert (stats.num_cut, stats.num_salvaged) == (1, 1)


@pytest.mark.parametrize(("texts", "min_rollouts"), [(["a", "b...", "c..."], 2), (["a", "bb", "c..."], 3)])
async def test_a_group_with_too_few_finished_rollouts_is_lost(texts, min_rollouts):
    ((lost,),) = await make(maker(timeout_s=0.02, min_rollouts=min_rollouts), [3], FakePolicy([texts]))
    assert (lost.admission.index, lost.outcome, lost.reason) == (3, "failed", "rollout_timeout")


async def test_a_refused_request_loses_its_own_group_only():
    batches = await make(maker(), [3, 4, 5], FakePolicy([["a", "bb", "c"]] * 3, refuses=[1]))
    assert [made.group.index for made in batches[0]] == [3, 5]
    assert [(lost.admission.index, lost.outcome, lost.reason) for lost in batches[1]] == [(4, "failed", "refused")]


async def test_a_group_whose_rewards_take_too_long_is_lost():
    class SlowRewards(FakeRewards):
        async def score(self, calls):
            await asyncio.sleep(5.0)
            return await super().score(calls)

    ((lost,),) = await make(maker(SlowRewards(), group_timeout_s=0.1), [3], FakePolicy([["a", "bb", "c"]]))
    assert (lost.admission.index, lost.outcome, lost.reason) == (3, "failed", "group_timeout")


async def test_a_failure_of_the_whole_policy_is_no_failure_of_a_group():
    class BrokenPolicy(FakePolicy):
        async def collect(self, ticket, linger_s):
            raise PolicyError("The engine failed: out of memory")

    with pytest.raises(PolicyError, match="out of memory"):
        await make(maker(), [3], BrokenPolicy([["a", "bb", "c"]]))


async def test_the_time_spent_scoring_is_counted_once():
    a_maker = maker()
    await make(a_maker, [0, 1], FakePolicy([["a", "bb", "c"]] * 2, batches=[[0], [1]]))
    stats = a_maker.take_stats()
    assert (stats.groups, len(stats.spans)) == (2, 2)
    assert a_maker.take_stats().groups == 0


@pytest.mark.parametrize(("rule", "reason"), [("refuse", "oversize"), ("truncate", "")])
async def test_a_group_with_a_sample_that_the_learner_does_not_take_is_refused_or_cut(rule, reason):
    policy = FakePolicy([["a", "bbbbbb", "cc"]])
    num_prompt = len(FakeSource().prompt(PromptId(source="fake", epoch=0, index=3)).token_ids)
    a_maker = maker(limit=SampleLimit(max_tokens=num_prompt + 3, rule=rule))
    ((made,),) = await make(a_maker, [3], policy)
    assert (made.outcome, made.reason) == ("filtered" if reason else "", reason)
    assert made.group.samples.lengths.tolist() == [num_prompt + 2, num_prompt + (7 if reason else 3), num_prompt + 3]
    assert made.group.rewards.tolist() == [1, 6, 2]
    assert a_maker.take_stats().num_oversize == 1


async def test_tokens_whose_kept_set_is_unknown_are_counted_and_not_trained_on():
    kept_set = np.array([[9, 7], [-1, -1], [9, -1], [2, -1], [-1, -1], [2, 9]], dtype=np.int32)
    a_maker = maker()
    ((made,),) = await make(a_maker, [3], FakePolicy([["a", "b", "c"]], kept_set=kept_set))
    assert made.group.samples.num_loss_tokens == 4
    assert a_maker.take_stats().num_unknown_tokens == 2
    await make(a_maker, [4], FakePolicy([["a", "b", "c"]]))
    assert a_maker.take_stats().num_unknown_tokens == 0


class FakeReference:
    """Says of each token its number in the question."""

    def __init__(self, delay_s=0.0):
        self.asked, self._delay_s = [], delay_s

    async def score(self, samples):
        await asyncio.sleep(self._delay_s)
        self.asked.append(samples)
        return {"reference_logprobs": np.arange(samples.num_tokens, dtype=np.float32)}


async def test_what_is_to_be_trained_on_is_scored_by_the_reference_in_one_question():
    reference = FakeReference(delay_s=0.05)
    made = maker(reference=reference)
    policy = FakePolicy([["a", "bb", "c"], ["a", "b", "c"], ["aa", "b", "c"]])
    (batch,) = await make(made, [5, 6, 7], policy)
    assert [(each.group.index, each.outcome) for each in batch] == [(5, ""), (6, "filtered"), (7, "")]
    (asked,) = reference.asked
    first, dropped, last = (each.group.samples for each in batch)
    assert asked.token_ids.tolist() == [*first.token_ids, *last.token_ids]
    assert first.reference_logprobs.tolist() == list(range(first.num_tokens))
    assert last.reference_logprobs.tolist() == list(range(first.num_tokens, asked.num_tokens))
    assert dropped.reference_logprobs is None and last.teacher_logprobs is None
    assert all(each.scored_s >= each.generated_s + 0.05 for each in (batch[0], batch[2]))
    stats = made.take_stats()
    assert 0.05 <= stats.reference_s < 5 and [span[0] for span in stats.spans] == ["score", "reference"]


async def test_a_reference_is_not_asked_when_nothing_is_to_be_trained_on():
    reference = FakeReference()
    await make(maker(reference=reference), [5], FakePolicy([["a", "b", "c"]]))
    assert not reference.asked
