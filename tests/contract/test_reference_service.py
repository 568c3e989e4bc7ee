"""Reference and teacher as a service: what is learnt is what is learnt with them on the learner's mesh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from contract.test_learner import (
    TitanSubject,
    free_port,
    make_samples,
    off_policy,
    share,
    weights_of,
)

from forge_async.core.errors import LearnerError
from tests.child import build_all, call_all
from tests.models import make_model

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]
TEMPERATURE = 0.7
FIELDS = ("reference_logprobs", "teacher_logprobs")


@pytest.fixture(scope="module")
def titan(children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("teacher"), seed=1)


def references(titan, teacher, children, **layout):
    """A rank of the service in each child; `layout`: of its own rows and micro-batches, in place of small ones."""
    port, folders = free_port(), {FIELDS[0]: str(titan.folder), FIELDS[1]: str(teacher)}
    return build_all(
        children,
        "tests.backends:titan_reference",
        [
            (
                (str(titan.folder), port, folders),
                {"rank": r, "ranks": len(children), "temperature": TEMPERATURE} | layout,
            )
            for r in range(len(children))
        ],
    )


def scored(samples, ranks):
    """The samples with what the service's ranks found, put together as its first rank does."""
    parts = call_all(ranks, "score", [(samples,)] * len(ranks))
    return dataclasses.replace(samples, **{name: sum(part[name] for part in parts) for name in FIELDS})


def with_kept_sets(samples, seed=0):
    """Each sampled token was drawn from itself and seven others, which are not it."""
    others = np.random.default_rng(seed).integers(3, 97, (samples.num_tokens, 7))
    others += others >= samples.token_ids[:, None]
    kept = np.concatenate([samples.token_ids[:, None], others], axis=1)
    return dataclasses.replace(samples, kept_set=np.where(samples.loss_mask[:, None], kept, -1).astype(np.int32))


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if not bool((tensor == other[name]).all())]


def test_two_ranks_score_as_one_and_as_the_models_do(children, tmp_path):
    """With weights as wide as a model's are when it is made: wider ones amplify float32's rounding, which differs where
    rows are laid out for two ranks."""
    titan = TitanSubject(children[0], make_model(tmp_path / "qwen3", deviation=0.02))
    teacher, samples = make_model(tmp_path / "teacher", seed=1, deviation=0.02), make_samples()
    one = scored(samples, references(titan, teacher, children[:1]))
    two = scored(samples, references(titan, teacher, children))
    for name in FIELDS:
        column = getattr(one, name)
        assert column.dtype == np.float32 and not column[~samples.loss_mask].any()
        assert getattr(two, name) == pytest.approx(column, abs=1e-6)
    edges, subjects = samples.bounds(), {FIELDS[0]: titan, FIELDS[1]: TitanSubject(children[0], teacher)}
    for name, subject in subjects.items():
        rows = zip(edges[:-1], edges[1:], strict=True)
        expected = [[0, *subject.logprobs(samples.token_ids[a:b], TEMPERATURE)] for a, b in rows]
        assert getattr(one, name) == pytest.approx(np.concatenate(expected) * samples.loss_mask, abs=1e-5)


@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ({"kl_weight": 0.1, "kl_kind": "k3_is", "teacher_weight": 0.5}, {"lr": 1e-4}),
        ({"kl_weight": 0.1, "kl_kind": "k1", "kl_place": "reward"}, {"lr": 1e-4}),
        ({"kl_weight": 0.1, "kl_kind": "k3_is", "teacher_weight": 0.5}, {"lr": 1e-2, "lora": {"rank": 4}}),
    ],
    ids=["in the loss", "in the reward", "under adapters"],
)
def test_a_learner_learns_the_same_whether_the_models_are_its_own_or_a_services(
    titan, teacher, children, objective, more
):
    """Bit for bit, where both lay out their rows alike; rows laid out otherwise give the same scores, as shown above.
    Under adapters the reference on the mesh is the model without them; the service reads it from its folder."""
    chosen = {
        "objective": {"teacher": str(teacher)} | objective,
        "updates_per_batch": 2,
        "temperature": TEMPERATURE,
    } | more
    batches = [with_kept_sets(off_policy(make_samples(seed=seed), titan.make())) for seed in range(3)]
    learner = titan.make(**chosen)
    results, weights = [learner.train(share(batch)) for batch in batches], weights_of(learner)
    assert results[-1].figures["reference/kl"] > 1e-7 and results[-1].figures["teacher/kl"] > 0.1

    service = references(titan, teacher, children[:1], row_tokens=64, micro_batch_tokens=8192)
    with_scores = [scored(batch, service) for batch in batches]
    learner = titan.make(**chosen, reads_frozen=False)
    others = [learner.train(share(batch)) for batch in with_scores]
    for one, other in zip(results, others, strict=True):
        assert dataclasses.replace(other, compute_s=0) == dataclasses.replace(one, compute_s=0)
    assert_equal(weights_of(learner), weights)


def test_ranks_with_less_to_do_take_part_and_what_was_not_scored_is_refused(titan, teacher, children):
    chosen = {"objective": {"kl_weight": 0.1, "teacher": str(teacher)}, "reads_frozen": False}
    sample = scored(make_samples(1), references(titan, teacher, children[:1]))
    arguments, port = str(titan.folder), free_port()
    ranks = build_all(
        children,
        "tests.backends:titan_learner",
        [((arguments, port), {"rank": rank, "ranks": 2} | chosen) for rank in range(2)],
    )
    one, other = call_all(ranks, "train", [(each,) for each in share(sample, 2)])
    assert one.figures["teacher/kl"] == other.figures["teacher/kl"] > 0
    with pytest.raises(LearnerError, match="came without teacher_logprobs, which reference.placement=service adds"):
        titan.make(**chosen).train(share(dataclasses.replace(sample, teacher_logprobs=None)))
