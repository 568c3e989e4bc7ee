import asyncio

import numpy as np
import pytest

from forge_async.core.errors import RewardError, StallError
from forge_async.core.records import Completions, PromptId
from forge_async.core.rng import request_seed
from forge_async.core.versions import PolicyVersion, VersionRuns
from forge_async.pipeline.make_groups import GroupMaker
from forge_async.policy.ports import GenerationResult, Sampling
from forge_async.reward.settings import AdvantageSettings
from forge_async.rollout.settings import RolloutSettings
from tests.fakes import FakeAdmission, FakeRenderer, FakeRewards, FakeSource

GROUP_SIZE = 3
STOP = 2


class FakePolicy:
    """Answers request i with `answers[i]` texts, in the order `batches` of positions."""

    def __init__(self, answers, batches=None):
        self.answers, self.requests = answers, []
        self.batches = list(batches or [range(len(answers))])

    async def submit(self, requests):
        self.requests += requests
        return 5

    async def collect(self, ticket, linger_s):
        assert ticket == 5
        await asyncio.sleep(0)
        batch = self.batches.pop(0)
        return [self._result(self.requests[at], self.answers[at]) for at in batch], not self.batches

    def _result(self, request, texts):
        tokens = [[*FakeRenderer().encode(text).tolist(), STOP] for text in texts]
        flat = [token for row in tokens for token in row]
        return GenerationResult(
            id=request.id,
            completions=Completions(
                lengths=np.array([len(row) for row in tokens], dtype=np.int32),
                token_ids=np.array(flat, dtype=np.int32),
                logprobs=np.full(len(flat), -1.0, dtype=np.float32),
                versions=VersionRuns.uniform(len(flat), PolicyVersion(step=6)),
                truncated=np.zeros(len(tokens), dtype=bool),
                cut=np.zeros(len(tokens), dtype=bool),
            ),
        )


class SilentPolicy(FakePolicy):
    async def collect(self, ticket, linger_s):
        await asyncio.Event().wait()


def admissions(*indices):
    return [
        FakeAdmission(index=i, prompt_id=PromptId(source="fake", epoch=0, index=i % 10), attempt=1) for i in indices
    ]


def maker(rewards=None, *, zero_variance="refill", timeout_s=5.0, **advantage):
    return GroupMaker(
        source=FakeSource(),
        renderer=FakeRenderer(),
        rewards=rewards or FakeRewards(),
        sampling=Sampling(max_new_tokens=9, stop_token_ids=(STOP,)),
        group_size=GROUP_SIZE,
        run_seed=11,
        advantage=AdvantageSettings(zero_variance=zero_variance, **advantage),
        rollout=RolloutSettings(group_timeout_s=timeout_s),
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


async def test_a_made_group_carries_rewards_advantages_and_what_people_read():
    rewards = FakeRewards()
    ((made,),) = await make(maker(rewards), [4], FakePolicy([["a", "bbb", "bb"]]))
    group = made.group
    assert (group.index, group.prompt_id.index, made.attempt) == (4, 4, 1)
    assert group.rewards.tolist() == [1, 3, 2]
    assert made.completions == ("a", "bbb", "bb"), "decoded without the stop token"
    assert [call.data for call in rewards.calls] == [{"answer": 4}] * 3
    assert made.prompt_text == "p4"
    assert made.num_tokens == 2 + 4 + 3
    assert made.filtered == ""
    assert group.oldest_step() == 6
    sampled = group.samples.advantages[group.samples.loss_mask]
    assert (np.sign(sampled) == [-1] * 2 + [1] * 4 + [0] * 3).all()
    assert sum(group.samples.advantages[group.samples.bounds()[1:] - 1]) == pytest.approx(0, abs=1e-6)
    assert made.generated_s <= made.scored_s


@pytest.mark.parametrize(("zero_variance", "filtered"), [("refill", "zero_variance"), ("keep", "")])
async def test_a_group_of_equal_rewards_is_filtered_if_the_settings_refill(zero_variance, filtered):
    batches = await make(maker(zero_variance=zero_variance), [0, 1], FakePolicy([["a", "b", "c"], ["a", "bb", "c"]]))
    assert [made.filtered for made in batches[0]] == [filtered, ""]
    assert not batches[0][0].group.samples.advantages.any()


async def test_the_penalty_for_length_makes_equal_rewards_differ_and_is_not_recorded_as_reward():
    rewards = FakeRewards(lambda prompt, completion: 1.0)
    policy = FakePolicy([["a", "bbbbb", "bbbbbbbb"]])
    ((made,),) = await make(maker(rewards, overlong_tokens=6, scale="none"), [0], policy)
    assert made.filtered == ""
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


async def test_a_silent_policy_is_named_after_the_deadline():
    with pytest.raises(
        StallError, match=r"rollout worker waited 0.02 s for the completions of groups 3\.\.4 from the po"
    ):
        await make(maker(timeout_s=0.02), [3, 4], SilentPolicy([]))


async def test_the_time_spent_scoring_is_counted_once():
    a_maker = maker()
    await make(a_maker, [0, 1], FakePolicy([["a", "bb", "c"]] * 2, batches=[[0], [1]]))
    stats = a_maker.take_stats()
    assert (stats.groups, len(stats.spans)) == (2, 2)
    assert a_maker.take_stats().groups == 0
