"""The built-in tasks and any reasoning-gym data set: prompts, verifier, and what is refused."""

import sys

import numpy as np
import pytest

from forge_async.core.errors import ConfigError, ForgeError, MissingPackageError
from forge_async.core.records import PromptId

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")

from forge_async.backends.reasoning_gym_task import EXACT, SCORE, ReasoningGymSource, exact, score
from forge_async.prompt.split import is_held_out
from forge_async.reward.pool import ProcessRewardPool
from forge_async.reward.ports import RewardCall


class Renderer:
    def render(self, text, system=""):
        return np.zeros(len(text), dtype=np.int32)


def source(task="sum", **options):
    return ReasoningGymSource(task, Renderer(), **options)


def prompts(source, num_prompts, epoch=0):
    return [source.prompt(PromptId(source=source.name, epoch=epoch, index=i)) for i in range(num_prompts)]


def verdict(prompt, completion, truncated=False):
    data = prompt.data
    return score(completion, data["data_set"], data["options"], data["entry"], truncated)


def test_sum_asks_for_sums_of_two_digits():
    for prompt in prompts(source(), 50):
        assert str(eval(prompt.text.removesuffix("="))) == prompt.data["answer"]
        assert len(prompt.text) == 4


def test_spell_asks_for_words_backwards():
    for prompt in prompts(source("spell"), 20):
        assert prompt.text.removesuffix(">")[::-1] == prompt.data["answer"]


def test_an_epoch_covers_nearly_all_training_prompts_and_no_held_out_one():
    texts = {prompt.text for prompt in prompts(source(), 1500)}
    held_out = {prompt.text for prompt in source().held_out(500)}
    assert (len(held_out), len(texts | held_out)) == (47, 200)
    assert all(is_held_out(text, 0.2) for text in held_out)


def test_other_data_sets_ask_their_question_with_options():
    prompt = prompts(source("chain_sum", options={"min_terms": 3, "max_terms": 3}), 1)[0]
    assert prompt.text.startswith("State the final answer")
    assert prompt.data["entry"]["metadata"]["num_terms"] == 3


@pytest.mark.parametrize("task", ["gsm_symbolic", "word_ladder", "propositional_logic"])
def test_data_sets_with_a_table_or_without_one_answer_work(task):
    prompt = prompts(source(task, num_prompts=10**6), 3)[-1]
    if prompt.data["answer"] is not None:
        assert verdict(prompt, prompt.data["answer"]) == 1.0


def test_the_verifier_knows_right_wrong_and_partly_right():
    prompt = prompts(source("spell"), 1)[0]
    answer = prompt.data["answer"]
    assert verdict(prompt, answer) == 1.0
    assert 0 < verdict(prompt, answer[:-1] + "?") < 1
    assert verdict(prompt, "") == 0.0


def test_a_truncated_completion_scores_nothing_even_if_right():
    prompt = prompts(source(), 1)[0]
    assert verdict(prompt, prompt.data["answer"], truncated=True) == 0.0
    assert exact(prompt.data["answer"], prompt.data["entry"], truncated=True) == 0.0


def test_exact_takes_the_reference_answer_only():
    entry = {"answer": "-4"}
    assert exact("-4", entry) == 1.0
    assert [exact(text, entry) for text in ("-4.0", " -4", "4", "", "-4 ")] == [0.0] * 5


def test_an_answer_in_tags_is_taken_out_of_them():
    assert exact("I think <answer>3</answer>, no: <answer> -4 </answer>", {"answer": "-4"}) == 1.0


def test_a_verifier_that_chokes_on_nonsense_calls_it_wrong():
    prompt = prompts(source("prime_factorization"), 1)[0]
    assert verdict(prompt, "zzz") == 0.0


async def test_both_verifiers_run_in_the_reward_pool():
    prompt = prompts(source(), 1)[0]
    answer = prompt.data["answer"]
    calls = [
        RewardCall(prompt=prompt.text, completion=completion, data=prompt.data, truncated=truncated)
        for completion, truncated in [(answer, False), (answer, True), (f"{answer}.0", False)]
    ]
    for reference, expected in [(SCORE, [1.0, 0.0, 1.0]), (EXACT, [1.0, 0.0, 0.0])]:
        pool = ProcessRewardPool(reference)
        await pool.start()
        outcomes = await pool.score(calls)
        await pool.close()
        assert [outcome.require() for outcome in outcomes] == expected


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_som", {}, "task.name=chain_som is neither .* did you mean chain_sum"),
        ("summ", {}, "did you mean sum"),
        ("sum", {"max_termz": 3}, "chain_sum has no option max_termz; did you mean max_terms"),
        ("sum", {"seed": 3}, "has no option seed"),
        ("sum", {"max_terms": 0}, "do not suit chain_sum: max_terms must be >= min_terms"),
        ("rearc", {}, "its verifier needs what JSON cannot carry"),
    ],
)
def test_an_unusable_task_is_refused_in_one_sentence(task, options, message):
    with pytest.raises(ConfigError, match=message):
        source(task, options=options)


def test_without_reasoning_gym_the_command_that_installs_it_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(MissingPackageError, match="make setup"):
        source()


def test_a_share_of_held_out_prompts_that_leaves_none_to_train_on_is_said(monkeypatch):
    monkeypatch.setattr("forge_async.backends.reasoning_gym_task.is_held_out", lambda text, fraction: True)
    with pytest.raises(ForgeError, match="lower task.held_out_fraction"):
        prompts(source(), 1)


def test_no_share_means_no_held_out_prompts():
    assert source(held_out_fraction=0.0).held_out(10) == []
