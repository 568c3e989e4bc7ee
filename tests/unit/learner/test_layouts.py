"""How samples are laid over rows, micro-batches and ranks changes neither loss nor gradient, for every objective.

The model is a table of logits of the next token, in float32, so that a whole step takes milliseconds; torchtitan's
learner is held to the same in `tests/contract/test_learner.py`.
"""

import dataclasses

import numpy as np
import pytest
import torch

from forge_async.core.records import Group, PromptId, Samples
from forge_async.core.versions import NOT_SAMPLED, VersionRuns
from forge_async.learner.batch import split_batch
from forge_async.learner.inputs import LossInputs
from forge_async.learner.layout import Layout
from forge_async.learner.loss import objective_loss
from forge_async.learner.rows import build_micro_batches
from forge_async.learner.settings import OBJECTIVES, ObjectiveSettings
from forge_async.replay.settings import CORRECTIONS

VOCAB, NOW = 13, 5
LAYOUTS = {"one_row": (10_000, 10_000, 1), "packed": (16, 32, 1), "padded": (1, 10_000, 1), "alone": (1, 1, 1),
           "two_ranks": (16, 32, 2), "more_ranks_than_samples": (16, 16, 11)}  # fmt: skip
"""Tokens of a row and of a micro-batch, ranks. Where samples share rows, they share the prompts that are equal too."""
DENOMINATORS = ("tokens", "sequence_means", "sequences", "constant")


def batch(seed=0, num_samples=9):
    """Samples of two turns with one of three prompts before and an answer between, of several versions."""
    rng = np.random.default_rng(seed)
    runs, mask = [], []
    for _ in range(num_samples):
        first, second = rng.integers(1, 6, size=2)
        runs += [
            (3, NOT_SAMPLED, 0),
            (int(first), 2, 0),
            (1, NOT_SAMPLED, 0),
            (int(second), int(rng.integers(3, 6)), 0),
        ]
        mask.append([False] * 3 + [True] * first + [False] + [True] * second)
    lengths = np.array([len(each) for each in mask], dtype=np.int32)
    flat = np.concatenate(mask)
    advantages = np.repeat(rng.normal(size=num_samples), lengths) * flat
    token_ids = rng.integers(0, VOCAB, size=len(flat)).astype(np.int32)
    for number, start in enumerate(np.cumsum(lengths) - lengths):
        token_ids[start : start + 3] = number % 3
    samples = Samples(
        lengths=lengths,
        token_ids=token_ids,
        loss_mask=flat,
        logprobs=(rng.normal(-2.5, 0.3, size=len(flat)) * flat).astype(np.float32),
        advantages=advantages.astype(np.float32),
        versions=VersionRuns.of(runs),
    )
    prompt = PromptId(source="s", epoch=0, index=0)
    return [Group(index=0, prompt_id=prompt, samples=samples, rewards=np.zeros(num_samples))]


def step(settings, correction, layout):
    """Loss, gradient and sums of a step over all ranks of a layout."""
    row_tokens, micro_batch_tokens, num_ranks = LAYOUTS[layout]
    layout_of = Layout(row_tokens=row_tokens, micro_batch_tokens=micro_batch_tokens, attention_tokens=8)
    generator = torch.Generator().manual_seed(3)
    table = (0.3 * torch.randn(VOCAB, VOCAB, generator=generator)).requires_grad_()
    reference = 0.3 * torch.randn(VOCAB, VOCAB, generator=generator)
    loss, total, sums = objective_loss(settings, correction), 0.0, {}
    for share in split_batch(batch(), num_ranks, keep_zero_advantage=True, layout=layout_of):
        for rows in build_micro_batches(share.samples, share.mini_batches[0].batches, share.skipped):
            terms = loss(inputs_of(rows, table, reference), share.counts)
            terms.loss.backward()
            total += float(terms.loss.detach())
            for name, value in terms.sums.items():
                sums[name] = sums.get(name, 0.0) + float(value)
    return total, table.grad, sums


def inputs_of(rows, table, reference):
    columns = {name: torch.from_numpy(getattr(rows, name)) for name in ("token_ids", "targets", "mask", "segments")}
    log_softmax = table.log_softmax(-1)[columns["token_ids"]]

    def taken(logits):
        return logits.gather(-1, columns["targets"][..., None])[..., 0]

    behaviour, steps = torch.from_numpy(rows.behaviour_logprobs), torch.from_numpy(rows.steps)
    return LossInputs(
        logprobs=taken(log_softmax),
        behaviour_logprobs=behaviour,
        anchor_logprobs=behaviour,
        advantages=torch.from_numpy(rows.advantages),
        mask=columns["mask"],
        segments=columns["segments"],
        num_segments=rows.num_segments,
        ages=(NOW - steps) * (steps >= 0),
        reference_logprobs=taken(reference.log_softmax(-1)[columns["token_ids"]]),
        teacher_logprobs=taken(reference.softmax(-1).log_softmax(-1)[columns["token_ids"]]),
        values=taken(table.tanh()[columns["token_ids"]]),
        old_values=taken(reference[columns["token_ids"]]),
        returns=columns["targets"].float() / VOCAB,
        entropy=-(log_softmax.exp() * log_softmax).sum(-1),
    )


def same_in_every_layout(settings, correction="token_is"):
    loss, gradient, sums = step(settings, correction, "one_row")
    assert float(gradient.norm()) > 0
    for layout in LAYOUTS:
        other_loss, other_gradient, other_sums = step(settings, correction, layout)
        assert other_loss == pytest.approx(loss, rel=1e-6, abs=1e-6), layout
        assert float((other_gradient - gradient).norm() / gradient.norm()) < 1e-6, layout
        assert other_sums == pytest.approx(sums, rel=1e-5, abs=1e-5), layout


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_every_objective_with_every_denominator(name, denominator):
    same_in_every_layout(ObjectiveSettings(name=name, denominator=denominator, constant_tokens=7))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_every_correction(correction):
    same_in_every_layout(ObjectiveSettings(name="rloo"), correction)


@pytest.mark.parametrize("kind", ["k2", "k3", "k3_is"])
def test_a_sum_of_all_components(kind):
    settings = ObjectiveSettings(
        name="gspo", denominator="sequence_means", kl_weight=0.1, kl_kind=kind, entropy_weight=0.02, teacher="there"
    )
    same_in_every_layout(settings, "icepop")


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_a_divergence_in_the_reward_and_advantages_normalised_over_the_batch(kind):
    settings = ObjectiveSettings(kl_weight=0.3, kl_kind=kind, kl_place="reward", normalise_advantages=True)
    same_in_every_layout(settings)


def test_prompts_are_shared_in_some_of_these_layouts():
    shared = {
        name: sum(int(share.skipped.sum()) for share in shares if share.skipped is not None)
        for name, (row_tokens, tokens, ranks) in LAYOUTS.items()
        for shares in [
            split_batch(
                batch(),
                ranks,
                keep_zero_advantage=True,
                layout=Layout(row_tokens=row_tokens, micro_batch_tokens=tokens),
            )
        ]
    }
    assert shared["one_row"] == 2 * 6 and 0 < shared["packed"] <= 12 and shared["padded"] == 0


def test_a_layout_does_change_a_loss_whose_denominator_is_local():
    """The check above can fail: divided by the tokens of each micro-batch, the loss depends on how many there are."""
    layout = Layout(row_tokens=16, micro_batch_tokens=32)
    (share,) = split_batch(batch(), 1, keep_zero_advantage=True, layout=layout)
    rows = build_micro_batches(share.samples, share.mini_batches[0].batches, share.skipped)
    counts = share.counts
    table = torch.zeros(VOCAB, VOCAB)
    loss = objective_loss(ObjectiveSettings(), "token_is")
    whole = sum(float(loss(inputs_of(each, table, table), counts).loss) for each in rows)
    local = [dataclasses.replace(counts, num_loss_tokens=int(each.mask.sum())) for each in rows]
    wrong = sum(
        float(loss(inputs_of(each, table, table), own).loss) / len(rows) for each, own in zip(rows, local, strict=True)
    )
    assert abs(whole - wrong) > 1e-3
