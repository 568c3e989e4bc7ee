"""`bench adapters`: its cases can run, and its samples can be stepped on."""

import pytest

from forge_async.apps.bench import adapters
from forge_async.config import Config, check


@pytest.mark.parametrize("case", adapters.CASES)
def test_each_case_is_a_configuration_that_runs(case):
    config = Config().replace(adapters.CASES[case])
    check(config)
    assert bool(config.travelling_lora()) == case.startswith("adapters/")


def test_its_samples_are_new_each_time_and_have_tokens_to_train():
    one, other = adapters.samples(0), adapters.samples(1)
    assert one.num_tokens == one.versions.num_tokens == 64
    assert one.num_loss_tokens == 48
    assert (one.token_ids != other.token_ids).any()
    assert set(one.advantages[one.loss_mask]) == {-1.0, 1.0}
