import dataclasses

import numpy as np
import pytest

from forge_async.core.records import PromptId, Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.rollout.oversize import SampleLimit, first_tokens, first_turns
from tests.strategies import make_group


def samples(*lengths):
    """Samples of so many sampled tokens each, behind the same prompt."""
    return make_group(0, PromptId(source="s", epoch=0, index=0), [list(range(3, 3 + n)) for n in lengths]).samples


def test_cut_samples_begin_like_the_whole_ones_and_the_others_are_as_they_were():
    whole = samples(2, 9, 4)
    limit = int(whole.lengths[2])
    cut, edges = first_tokens(whole, limit), whole.bounds()
    assert cut.lengths.tolist() == np.minimum(whole.lengths, limit).tolist()
    steps, cut_steps = whole.versions.per_token_steps(), cut.versions.per_token_steps()
    for number, start in enumerate(cut.bounds()[:-1]):
        here, there = (
            slice(start, start + cut.lengths[number]),
            slice(edges[number], edges[number] + cut.lengths[number]),
        )
        for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
            assert (getattr(cut, name)[here] == getattr(whole, name)[there]).all()
        assert (cut_steps[here] == steps[there]).all()


def test_without_a_limit_or_below_it_nothing_happens():
    whole = samples(2, 9)
    assert SampleLimit().applied(whole) is whole
    assert SampleLimit(max_tokens=int(whole.lengths.max())).applied(whole) is whole
    assert SampleLimit(max_tokens=int(whole.lengths.max()) - 1).num_oversize(whole) == 1


@pytest.mark.parametrize("rule", ["refuse", "truncate", "turns"])
def test_a_sample_whose_prompt_alone_is_too_long_is_refused_under_every_rule(rule):
    whole = samples(2, 9)
    prompt_tokens = int(whole.lengths[0]) - 2
    assert SampleLimit(max_tokens=prompt_tokens, rule=rule).applied(whole) is None


def of_turns(*samples_of):
    """Samples of a prompt of 2 and turns of so many tokens, an answer of one token between."""
    runs, sampled = [], []
    for turns in samples_of:
        runs.append((2, NOT_SAMPLED, 0))
        sampled += [False] * 2
        for number, count in enumerate(turns):
            runs += [(1, NOT_SAMPLED, 0)] * bool(number) + [(count, 5 + number, 0)]
            sampled += [False] * bool(number) + [True] * count
    mask = np.array(sampled)
    return Samples(
        lengths=np.array([2 + sum(turns) + len(turns) - 1 for turns in samples_of], dtype=np.int32),
        token_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        logprobs=-np.ones(len(mask), np.float32) * mask,
        advantages=np.ones(len(mask), np.float32) * mask,
        versions=VersionRuns.of(runs),
    )


def test_turns_are_kept_whole_or_not_at_all():
    # 2 + 3, 1 + 2, 1 + 4 tokens: turns end at 5, 8 and 13.
    whole = of_turns((3, 2, 4), (3,))
    assert [first_turns(whole, limit).lengths.tolist() for limit in (13, 12, 8, 7, 5, 4)] == [
        [13, 5], [8, 5], [8, 5], [5, 5], [5, 5], [0, 0],
    ]  # fmt: skip
    cut = SampleLimit(max_tokens=10, rule="turns").applied(whole)
    assert cut.token_ids.tolist() == [*range(8), *range(13, 18)]
    assert cut.loss_mask.tolist() == [False, False, True, True, True, False, True, True] + [False] * 2 + [True] * 3
    assert cut.versions.per_token_steps().tolist() == [-1, -1, 5, 5, 5, -1, 6, 6, -1, -1, 5, 5, 5]
    assert SampleLimit(max_tokens=4, rule="turns").applied(whole) is None, "no turn fits"


def test_a_turn_of_tokens_that_are_not_all_trained_on_is_still_one_turn():
    whole = of_turns((4,))
    mask = whole.loss_mask.copy()
    mask[3] = False
    assert SampleLimit(max_tokens=5, rule="turns").applied(dataclasses.replace(whole, loss_mask=mask)) is None
