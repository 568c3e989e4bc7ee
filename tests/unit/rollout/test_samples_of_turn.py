import numpy as np

from forge_async.core.records import Completions
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.rollout.samples import samples_of_turn


def turn(kept_set=None, routed_experts=None):
    """A prompt of 2 tokens, completions of 3, 1 and 2 tokens; the version changes inside the first and the last."""
    completions = Completions(
        lengths=np.array([3, 1, 2], dtype=np.int32),
        token_ids=np.arange(10, 16, dtype=np.int32),
        logprobs=-np.arange(1, 7, dtype=np.float32),
        versions=VersionRuns.of([(2, 4, 0), (3, 5, 0), (1, 6, 1)]),
        truncated=np.array([True, False, False]),
        cut=np.zeros(3, dtype=bool),
        kept_set=kept_set,
        routed_experts=routed_experts,
    )
    return samples_of_turn(np.array([7, 8], np.int32), completions, np.array([1.0, -0.5, 0.0]))


def test_each_completion_follows_its_prompt_untouched():
    samples = turn()
    assert samples.lengths.tolist() == [5, 3, 4]
    assert samples.token_ids.tolist() == [7, 8, 10, 11, 12, 7, 8, 13, 7, 8, 14, 15]


def test_only_what_the_policy_made_is_trained_on():
    samples = turn()
    assert samples.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 0, 1, 1]
    assert samples.logprobs.tolist() == [0, 0, -1, -2, -3, 0, 0, -4, 0, 0, -5, -6]
    assert samples.advantages.tolist() == [0, 0, 1, 1, 1, 0, 0, -0.5, 0, 0, 0, 0]
    assert samples.num_loss_tokens == 6


def test_every_token_keeps_the_version_that_made_it():
    samples = turn()
    none = NOT_SAMPLED
    assert samples.versions.per_token_steps().tolist() == [none, none, 4, 4, 5, none, none, 5, none, none, 5, 6]
    assert samples.oldest_steps().tolist() == [4, 5, 5]
    assert samples.versions.incarnations[-1] == 1


def test_the_columns_have_the_types_of_the_record():
    samples = turn()
    assert (samples.lengths.dtype, samples.token_ids.dtype) == (np.int32, np.int32)
    assert (samples.loss_mask.dtype, samples.logprobs.dtype, samples.advantages.dtype) == (bool, np.float32, np.float32)


def test_each_sampled_token_has_its_kept_set_and_a_prompt_has_none():
    assert turn().kept_set is None
    sets = np.arange(12, dtype=np.int32).reshape(6, 2)
    samples = turn(sets)
    assert samples.kept_set.dtype == np.int32
    assert samples.kept_set[samples.loss_mask].tolist() == sets.tolist()
    assert (samples.kept_set[~samples.loss_mask] == -1).all()
    assert samples.loss_mask.tolist() == turn().loss_mask.tolist()


def test_a_token_whose_set_is_not_known_is_not_trained_on():
    sets = np.arange(12, dtype=np.int32).reshape(6, 2)
    sets[[1, 5]] = -1
    samples = turn(sets)
    assert samples.loss_mask.astype(int).tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert samples.logprobs.tolist() == [0, 0, -1, 0, -3, 0, 0, -4, 0, 0, -5, 0]
    assert not samples.advantages[~samples.loss_mask].any()
    assert samples.versions.per_token_steps().tolist() == turn().versions.per_token_steps().tolist()


def test_routed_experts_lie_as_the_tokens_do_the_prompts_before_each_completion():
    routed = np.arange(12, dtype=np.uint8).reshape(12, 1, 1)
    samples = turn(routed_experts=routed)
    assert samples.select([2, 0]).routed_experts.flatten().tolist() == [8, 9, 10, 11, 0, 1, 2, 3, 4]
