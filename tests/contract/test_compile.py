"""Compiled models on this machine: they compute what the others do, and swap weights between two steps."""

from __future__ import annotations

import numpy as np
import pytest
from contract.test_learner import TitanSubject, assert_close, make_samples, off_policy, share, weights_of

from forge_async.core.versions import PolicyVersion
from tests.child import Child
from tests.engines import PROMPT, finish, request
from tests.models import Reference, make_model, read_weights, without_end

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture
def child(tmp_path):
    made = Child(tmp_path / "log", timeout_s=800)
    yield made
    made.close()


def test_a_compiled_learner_learns_what_the_other_does(child, tmp_path):
    titan = TitanSubject(child, make_model(tmp_path / "model"))
    batches = [off_policy(make_samples(num, seed=num), titan.make()) for num in (5, 9, 6)]
    found = []
    for compiles in (False, True):
        learner = titan.make(lr=1e-4, compile=compiles)
        found.append(([learner.train(share(batch)) for batch in batches], weights_of(learner)))
    (results, weights), (others, other_weights) = found
    for one, other in zip(results, others, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert_close(weights, other_weights, rel=1e-5)


def test_a_compiled_engine_samples_from_the_weights_that_it_was_given(child, tmp_path):
    folders = [without_end(make_model(tmp_path / f"model{seed}", seed=seed)) for seed in (0, 1)]
    engine = child.build("tests.backends:vllm_engine", str(folders[0]), compile=True)
    for step, folder in enumerate(folders):
        engine.load(read_weights(folder), PolicyVersion(step=step))
        engine.add([request(n=4, tokens=16)])
        completions, reference = finish(engine)["a"], Reference(folder)
        for tokens, logprobs in zip(completions.rows(), np.split(completions.logprobs, 4), strict=True):
            expected = reference.logprobs([*PROMPT, *tokens.tolist()])[len(PROMPT) - 1 :]
            assert logprobs == pytest.approx(expected, abs=1e-4)
