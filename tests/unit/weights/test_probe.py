"""The probe: what an engine that cannot be read back is compared by, and how it travels with a version."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import FingerprintError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import Probe
from forge_async.weights.probe import ProbeCheck, probe_of
from tests.models import manifest_of

WEIGHTS = {"w": torch.ones(2, 2)}
LOGPROBS = (-1.0, -2.0, -0.5)


def manifest(step=1, logprobs=LOGPROBS):
    probe = None if logprobs is None else Probe(token_ids=(5, 6, 7, 8), logprobs=tuple(logprobs))
    return dataclasses.replace(manifest_of(WEIGHTS, PolicyVersion(step=step)), probe=probe)


def served(*gaps):
    return (np.array(LOGPROBS) + np.array(gaps)).astype(np.float32)


def test_the_gap_is_the_mean_difference_of_a_token():
    assert ProbeCheck("policy_0", 0.5).look(manifest(), served(0.3, -0.3, 0.0)) == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("gaps", [(0.7, -0.7, 0.7), (float("nan"), 0.0, 0.0), (float("-inf"), 0.0, 0.0)])
def test_an_engine_that_is_too_far_off_is_refused(gaps):
    with pytest.raises(FingerprintError, match=r"policy_0 pulled policy@0.1, .* weights.probe_limit=0.5; it must not"):
        ProbeCheck("policy_0", 0.5).look(manifest(), served(*gaps))


def test_an_engine_that_did_not_move_with_the_learner_is_refused():
    check = ProbeCheck("policy_0", 1.0)
    check.look(manifest(1), served(0.1, 0.1, 0.1))
    with pytest.raises(FingerprintError, match=r"policy@0.2, but computes as it did before, .* moved by 0.1 nats"):
        check.look(manifest(2, (-1.1, -2.1, -0.6)), served(0.1, 0.1, 0.1))


def test_an_engine_need_not_move_when_the_learner_hardly_did():
    check = ProbeCheck("policy_0", 1.0)
    check.look(manifest(1), served(0.1, 0.1, 0.1))
    check.look(manifest(2, (-1.00001, -2.0, -0.5)), served(0.1, 0.1, 0.1))


@given(
    st.lists(st.floats(-20, 0, width=32), min_size=3, max_size=3),
    st.lists(st.floats(-0.1875, 0.1875, width=32), min_size=3, max_size=3),
)
def test_whoever_is_near_the_learner_and_moves_with_it_passes(logprobs, gaps):
    check, later = ProbeCheck("policy_0", 0.21), [each - 1 for each in logprobs]
    first = np.array(logprobs) + np.array(gaps)
    check.look(manifest(1, logprobs), first)
    assert check.look(manifest(2, later), first - 1) == pytest.approx(np.abs(gaps).mean(), abs=1e-6)


def test_a_version_without_a_probe_is_refused_with_the_remedy():
    with pytest.raises(FingerprintError, match="policy_0 is quantised, .* probe_tokens, or give weights.verify=none"):
        probe_of(manifest(logprobs=None), "policy_0")
