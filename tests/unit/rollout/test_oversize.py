import numpy as np
import pytest

from forge_async.core.records import PromptId
from forge_async.rollout.oversize import SampleLimit, first_tokens
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


@pytest.mark.parametrize("rule", ["refuse", "truncate"])
def test_a_sample_whose_prompt_alone_is_too_long_is_refused_under_either_rule(rule):
    whole = samples(2, 9)
    prompt_tokens = int(whole.lengths[0]) - 2
    assert SampleLimit(max_tokens=prompt_tokens, rule=rule).applied(whole) is None
