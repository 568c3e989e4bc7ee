"""What every Learner promises: the fake that unit tests use, and torchtitan on one rank and on two."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket

import numpy as np
import pytest

from forge_async.core.errors import ConfigError, LearnerError, NonFiniteError
from forge_async.core.records import Group, PromptId, Samples
from forge_async.core.versions import NOT_SAMPLED, PolicyVersion, VersionRuns
from forge_async.learner.batch import MiniBatch, Share, split_batch
from forge_async.learner.counts import Counts
from forge_async.learner.layout import Layout
from forge_async.weights.manifest import Packed, build_manifest
from forge_async.weights.packing import check_blob, digests, unpack
from tests.child import Child, build_all, call_all
from tests.copying import Overtaking
from tests.fakes import FakeLearner, bigram_table, log_softmax
from tests.models import Reference, make_model, read_weights

pytestmark = pytest.mark.timeout(180)


class FakeSubject:
    def make(self, **settings):
        return FakeLearner(lr=settings.get("lr", 1e-3))

    def logprobs(self, tokens, temperature=1.0):
        return log_softmax(bigram_table(0)[tokens[:-1]])[np.arange(len(tokens) - 1), tokens[1:]]


class TitanSubject:
    """torchtitan with one model folder, in a process of its own; each learner takes the place of the one before."""

    def __init__(self, child, folder):
        self.folder, self._child, self._reference = folder, child, Reference(folder)

    def make(self, **settings):
        return self._child.build("tests.backends:titan_learner", str(self.folder), free_port(), **settings)

    def logprobs(self, tokens, temperature=1.0):
        return self._reference.logprobs(tokens, temperature)

    def entropies(self, tokens, temperature):
        return self._reference.entropies(tokens, temperature)


@pytest.fixture(scope="module")
def titan(children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(params=["fake", pytest.param("titan", marks=pytest.mark.stack)])
def subject(request):
    return FakeSubject() if request.param == "fake" else request.getfixturevalue("titan")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_samples(num_samples=9, *, seed=0, advantage=1.0):
    """Samples of 3 prompt tokens and 6 to 11 sampled ones, log-probabilities near -2, advantages of both signs."""
    rng = np.random.default_rng(seed)
    num_new = rng.integers(6, 12, size=num_samples)
    mask = np.concatenate([np.repeat([False, True], (3, new)) for new in num_new])
    total = len(mask)
    signs = np.repeat(rng.choice([-1.0, 1.0], size=num_samples) * advantage, num_new + 3)
    return Samples(
        lengths=(num_new + 3).astype(np.int32),
        token_ids=rng.integers(3, 98, size=total).astype(np.int32),
        loss_mask=mask,
        logprobs=(mask * rng.normal(-2, 0.3, size=total)).astype(np.float32),
        advantages=(mask * signs).astype(np.float32),
        versions=VersionRuns.of(run for new in num_new for run in ((3, NOT_SAMPLED, 0), (int(new), 0, 0))),
    )


def on_policy(samples, learner):
    """The same samples, sampled by `learner` itself."""
    edges = samples.bounds()
    sequences = [samples.token_ids[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    scored = np.concatenate([[0.0, *each] for each in learner.score(sequences)])
    return dataclasses.replace(samples, logprobs=(scored * samples.loss_mask).astype(np.float32))


def share(samples, num_ranks=1, **layout):
    """All shares of a batch, or the only one; `layout`: fields of Layout."""
    group = Group(index=5, prompt_id=PromptId(source="s", epoch=0, index=5), samples=samples, rewards=np.zeros(1))
    laid = Layout(**{"micro_batch_tokens": 8192} | layout)
    shares = split_batch([group], num_ranks, keep_zero_advantage=True, layout=laid)
    return shares if num_ranks > 1 else shares[0]


NO_COUNTS = Counts(num_loss_tokens=0, num_samples=0, num_batch_samples=0, num_samples_with_advantage=0)
NOTHING = Share(
    samples=None, counts=NO_COUNTS, mini_batches=(MiniBatch(counts=NO_COUNTS, batches=[]),), group_indices=(5,)
)


def weights_of(learner):
    """The parameters, through a snapshot of one rank."""
    part, blob = learner.snapshot()
    return unpack(build_manifest(learner.version, [Packed(part=part)]), {0: blob})


def assert_close(one, other, *, rel=1e-6):
    """Each parameter differs by less than `rel` of its norm.

    By norm, because AdamW's first steps move an element whose gradient is rounding noise as far as any other.
    """
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        difference = float((tensor - other[name]).norm() / tensor.norm())
        assert difference < rel, f"{name}: {difference:.2e}"


def trained(learner, steps=2, seed=0, **layout):
    """Steps on batches whose ratios lie near 1; the results and the weights."""
    batches = (make_samples(seed=seed + step) for step in range(steps))
    results = [learner.train(share(on_policy(batch, learner), **layout)) for batch in batches]
    return results, weights_of(learner)


def test_a_score_is_what_the_reference_computes(subject):
    learner = subject.make()
    sequences = [np.arange(4, 4 + length, dtype=np.int32) for length in (2, 9, 30)]
    for scored, tokens in zip(learner.score(sequences), sequences, strict=True):
        assert scored.dtype == np.float32
        assert scored == pytest.approx(subject.logprobs(tokens), abs=1e-5)


def test_a_step_makes_the_next_version_and_other_weights(subject):
    learner = subject.make()
    before = learner.digest()
    assert learner.version == PolicyVersion()
    result = learner.train(share(make_samples()))
    assert result.version == learner.version == PolicyVersion(step=1)
    assert result.num_loss_tokens == make_samples().num_loss_tokens
    assert np.isfinite([result.loss, result.grad_norm]).all()
    assert result.grad_norm > 0
    assert learner.digest() != before


def test_equal_runs_give_equal_weights_bit_for_bit(subject):
    digests = []
    for _ in range(2):
        learner = subject.make()
        for step in range(3):
            learner.train(share(make_samples(seed=step)))
        digests.append(learner.digest())
    assert digests[0] == digests[1]


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_likely(subject):
    learner = subject.make(lr=3e-3)
    samples = on_policy(make_samples(), learner)
    before = samples.logprobs
    for _ in range(2):
        learner.train(share(samples))
    change = (on_policy(samples, learner).logprobs - before)[samples.loss_mask]
    assert float(np.mean(change * samples.advantages[samples.loss_mask])) > 0


def test_a_batch_without_a_token_to_train_is_a_step_that_changes_nothing(subject):
    learner = subject.make()
    before = learner.digest()
    result = learner.train(NOTHING)
    assert (result.loss, result.grad_norm, result.num_loss_tokens) == (0, 0, 0)
    assert learner.version == PolicyVersion(step=1)
    assert learner.digest() == before


def test_a_loss_that_is_not_finite_leaves_everything_as_it_was(subject):
    learner, untouched = subject.make(), None
    before = learner.digest()
    with pytest.raises(NonFiniteError, match=r"Step 0: .*groups .*5"):
        learner.train(share(make_samples(advantage=np.nan)))
    assert learner.digest() == before
    assert learner.version == PolicyVersion()
    learner.train(share(make_samples()))
    after = learner.digest()
    untouched = subject.make()
    untouched.train(share(make_samples()))
    assert untouched.digest() == after, "nothing of the refused gradient is left"


def test_a_learner_goes_on_from_its_checkpoint_as_if_nothing_had_happened(subject, tmp_path):
    learner = subject.make()
    for step in range(2):
        learner.train(share(make_samples(seed=step)))
    learner.save_state(tmp_path / "state")
    expected = [learner.train(share(make_samples(seed=step))) for step in (2, 3)]
    digest = learner.digest()
    restored = subject.make()
    restored.restore(tmp_path / "state", PolicyVersion(incarnation=1, step=2))
    assert restored.version == PolicyVersion(incarnation=1, step=2)
    found = [restored.train(share(make_samples(seed=step))) for step in (2, 3)]
    assert [(each.loss, each.grad_norm, each.lr) for each in found] == [
        (each.loss, each.grad_norm, each.lr) for each in expected
    ]
    assert found[-1].version == PolicyVersion(incarnation=1, step=4)
    assert restored.digest() == digest


def test_a_checkpoint_that_is_not_there_is_named(subject, tmp_path):
    with pytest.raises(LearnerError, match="state cannot be read.*delete its folder"):
        subject.make().restore(tmp_path / "state", PolicyVersion(step=2))


def test_a_snapshot_is_what_save_writes_and_does_not_move_with_the_next_step(subject, tmp_path):
    learner = subject.make()
    learner.train(share(make_samples()))
    learner.save(tmp_path / "model")
    part, blob = learner.snapshot()
    assert learner.snapshot_bytes == blob.numel()
    copied = blob.clone()
    manifest = build_manifest(learner.version, [Packed(part=part, digests=digests(part, blob))])
    learner.train(share(make_samples(seed=1)))
    assert (blob == copied).all()
    check_blob(manifest, 0, blob)
    weights, saved = unpack(manifest, {0: blob}), read_weights(tmp_path / "model")
    assert weights.keys() == saved.keys()
    assert all((saved[name] == tensor).all() for name, tensor in weights.items())
    learner.save(tmp_path / "model")
    assert any((read_weights(tmp_path / "model")[name] != tensor).any() for name, tensor in saved.items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.stack
@pytest.mark.parametrize("kind", ["qwen3_untied", "llama", "llama_untied"])
def test_other_architectures_agree_with_transformers(children, tmp_path, kind):
    subject = TitanSubject(children[0], make_model(tmp_path / kind, kind))
    learner, tokens = subject.make(), np.arange(5, 60, dtype=np.int32)
    assert learner.score([tokens])[0] == pytest.approx(subject.logprobs(tokens), abs=1e-5)
    saved = read_weights(subject.folder)
    assert {name: tensor.shape for name, tensor in weights_of(learner).items()} == {
        name: tensor.shape for name, tensor in saved.items()
    }
    assert all((saved[name] == tensor).all() for name, tensor in weights_of(learner).items())


@pytest.mark.stack
def test_what_is_saved_is_a_model_that_transformers_loads(titan, tmp_path):
    learner, tokens = titan.make(), np.arange(5, 30, dtype=np.int32)
    learner.train(share(make_samples()))
    learner.save(tmp_path / "model")
    assert learner.score([tokens])[0] == pytest.approx(Reference(tmp_path / "model").logprobs(tokens), abs=1e-5)
    assert (tmp_path / "model" / "tokenizer.json").exists()


@pytest.mark.stack
def test_logits_are_divided_by_the_samplers_temperature(titan):
    learner, tokens = titan.make(temperature=0.7), np.arange(5, 30, dtype=np.int32)
    assert learner.score([tokens])[0] == pytest.approx(titan.logprobs(tokens, 0.7), abs=1e-5)
    assert learner.score([tokens], temperature=1.0)[0] == pytest.approx(titan.logprobs(tokens), abs=1e-5)


@pytest.mark.stack
def test_with_unchanged_weights_the_ratio_is_one(titan):
    learner = titan.make()
    result = learner.train(share(on_policy(make_samples(), learner)))
    assert result.logprob_diff_max < 1e-5
    assert result.clip_fraction == 0
    assert abs(result.mismatch_kl) < 1e-9


@pytest.mark.stack
@pytest.mark.parametrize(
    "layout",
    [
        {"packed": False},
        {"row_tokens": 8, "micro_batch_tokens": 8},
        {"micro_batch_tokens": 64},
        {"row_tokens": 512},
        {"logit_chunk_tokens": 5},
    ],
    ids=["padded", "one_sample_each", "one_row_each", "one_row", "logits_in_chunks"],
)
def test_how_samples_are_laid_out_changes_nothing(titan, layout):
    (first, second), weights = trained(titan.make(lr=1e-4))
    settings = {name: layout[name] for name in ("logit_chunk_tokens",) if name in layout}
    rows = {name: value for name, value in layout.items() if name not in settings}
    (other_first, other_second), other_weights = trained(titan.make(lr=1e-4, **settings), **rows)
    for one, other in ((first, other_first), (second, other_second)):
        assert other.loss == pytest.approx(one.loss, rel=1e-5)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert_close(weights, other_weights)
    packed, padded = (trained(titan.make(), steps=1, **how)[0][0] for how in ({"row_tokens": 512}, {"packed": False}))
    assert packed.num_row_tokens == packed.num_sample_tokens == padded.num_sample_tokens < padded.num_row_tokens


@pytest.mark.stack
def test_threads_are_those_that_were_asked_for(titan):
    results, weights = trained(titan.make(lr=1e-4, threads=2))
    assert titan._child.build("tests.backends:Threads").num == 2
    others, other_weights = trained(titan.make(lr=1e-4))
    assert titan._child.build("tests.backends:Threads").num == 1
    assert [each.loss for each in results] == pytest.approx([each.loss for each in others], rel=1e-5)
    assert_close(weights, other_weights)


@pytest.mark.stack
def test_a_row_too_wide_for_a_mask_trains_like_short_ones(titan):
    batch, found = off_policy(make_samples(300), titan.make()), []
    for row_tokens in (64, 4096):
        learner = titan.make(lr=1e-4)
        found.append((learner.train(share(batch, row_tokens=row_tokens)), weights_of(learner)))
    (narrow, weights), (wide, other_weights) = found
    assert wide.num_row_tokens == wide.num_sample_tokens > 2048, "one row"
    assert wide.loss == pytest.approx(narrow.loss, rel=1e-5)
    assert wide.grad_norm == pytest.approx(narrow.grad_norm, rel=1e-5)
    assert_close(weights, other_weights)


def of_few_prompts(samples, prompts=3):
    """The same samples, beginning with one of a few prompts in turn, of which all but the last token can be shared."""
    token_ids = samples.token_ids.copy()
    for number, start in enumerate(samples.bounds()[:-1].tolist()):
        token_ids[start : start + 3] = np.arange(3) + 10 * (1 + number % prompts)
    return dataclasses.replace(samples, token_ids=token_ids)


@pytest.mark.stack
@pytest.mark.parametrize("layout", [{"row_tokens": 64}, {"row_tokens": 4096}], ids=["one_mask", "part_by_part"])
@pytest.mark.parametrize("chosen", ["plain", "everything"])
def test_a_prompt_that_samples_share_is_computed_once_and_nothing_changes(titan, layout, chosen):
    settings = {"lr": 1e-4} | (
        {"objective": EVERYTHING, "correction": "decoupled", "updates_per_batch": 2} if chosen == "everything" else {}
    )
    batch, found = off_policy(of_few_prompts(make_samples(300)), titan.make()), []
    for shares in (True, False):
        learner = titan.make(**settings)
        found.append((learner.train(share(batch, share_prompts=shares, **layout)), weights_of(learner)))
    (shared, weights), (apart, other_weights) = found
    assert apart.num_sample_tokens == batch.num_tokens - len(batch)
    assert shared.num_sample_tokens < apart.num_sample_tokens - 400
    if layout["row_tokens"] == 4096:
        assert shared.num_sample_tokens == apart.num_sample_tokens - 297 * 2, "three prompts"
    assert shared.loss == pytest.approx(apart.loss, rel=1e-5, abs=1e-6)
    assert shared.grad_norm == pytest.approx(apart.grad_norm, rel=1e-5)
    assert shared.figures == pytest.approx(apart.figures, rel=1e-4, abs=1e-6)
    assert_close(weights, other_weights)


def one_long_sample(num_tokens):
    mask = np.arange(num_tokens) >= 3
    return Samples(
        lengths=np.array([num_tokens], dtype=np.int32),
        token_ids=np.random.default_rng(0).integers(3, 98, size=num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=(-9.0 * mask).astype(np.float32),
        advantages=mask.astype(np.float32),
        versions=VersionRuns.of([(3, NOT_SAMPLED, 0), (num_tokens - 3, 0, 0)]),
    )


@pytest.mark.stack
@pytest.mark.parametrize("num_tokens", [8192, pytest.param(32768, marks=pytest.mark.long)])
def test_a_long_sample_trains_in_less_memory_than_its_logits_alone_would_take(tmp_path, num_tokens):
    vocabulary = 8192
    folder = make_model(tmp_path / "model", vocabulary=vocabulary, max_positions=num_tokens)
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1048576"}  # what is freed goes back, so that the peak is of what is held
    with contextlib.closing(Child(tmp_path / "log", env=at_once)) as child:
        learner = TitanSubject(child, folder).make(logit_chunk_tokens=512)
        before_kib = child.build("resource:getrusage", 0).ru_maxrss
        result = learner.train(share(one_long_sample(num_tokens)))
        peak_kib = child.build("resource:getrusage", 0).ru_maxrss - before_kib
    assert result.num_loss_tokens == num_tokens - 3
    assert result.grad_norm > 0
    assert peak_kib * 1024 < num_tokens * vocabulary * 4, f"{peak_kib / 1024:.0f} MiB"


SEQUENCES = {"name": "gspo", "denominator": "sequence_means", "clip_low": 0.01, "clip_high": 0.01}
CONSTANT = {"name": "cispo", "denominator": "constant", "constant_tokens": 9, "normalise_advantages": True}


def off_policy(samples, learner, seed=7):
    """The same samples as another policy would have sampled them: some log-probabilities differ by 0.2 or so."""
    mine = on_policy(samples, learner)
    noise = np.random.default_rng(seed).normal(0, 0.2, size=len(mine.logprobs)) * mine.loss_mask
    return dataclasses.replace(mine, logprobs=(mine.logprobs + noise).astype(np.float32))


@pytest.mark.stack
@pytest.mark.parametrize(
    ("objective", "correction"), [(SEQUENCES, "token_is"), (CONSTANT, "icepop"), ({}, "vtrace")], ids=str
)
def test_what_other_objectives_measure_does_not_depend_on_the_layout_either(titan, objective, correction):
    """Their gradients: `test_layout_gradients.py`."""
    chosen = {"lr": 1e-4, "objective": objective, "correction": correction}
    batch, results = off_policy(make_samples(18), titan.make()), []
    for layout in ({"row_tokens": 512}, {"row_tokens": 8, "micro_batch_tokens": 8}):
        learner = titan.make(**chosen)
        results.append(learner.train(share(batch, **layout)))
    assert results[1].loss == pytest.approx(results[0].loss, rel=1e-5, abs=1e-6)
    assert results[1].grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
    assert results[1].figures == pytest.approx(results[0].figures, rel=1e-5)
    assert results[0].figures["ratio/effective_fraction"] < 0.999


EVERYTHING = {
    "name": "ppo", "kl_weight": 0.1, "kl_kind": "k3_is", "entropy_weight": 0.01, "normalise_advantages": True,
}  # fmt: skip


@pytest.mark.stack
def test_values_reference_entropy_and_several_updates_do_not_depend_on_the_layout(titan):
    chosen = {"lr": 1e-4, "objective": EVERYTHING, "correction": "decoupled", "updates_per_batch": 2}
    batches = [off_policy(make_samples(seed=seed), titan.make()) for seed in range(2)]
    found = []
    for chunk, layout in ((2048, {"row_tokens": 512}), (7, {"row_tokens": 8, "micro_batch_tokens": 16})):
        learner = titan.make(**chosen, logit_chunk_tokens=chunk)
        found.append(([learner.train(share(batch, **layout)) for batch in batches], weights_of(learner)))
    (results, weights), (others, other_weights) = found
    for one, other in zip(results, others, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-6)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
        assert other.figures == pytest.approx(one.figures, rel=1e-4, abs=1e-6)
    assert_close(weights, other_weights)
    assert results[0].version.step == 1
    assert results[0].figures["staleness/extra_updates"] == 1


@pytest.mark.stack
@pytest.mark.parametrize("correction", ["token_is", "vtrace"])
def test_the_value_head_learns_what_it_is_rewarded_for(titan, correction):
    learner = titan.make(objective={"name": "ppo", "value_clip": 0.0}, lr=3e-3, correction=correction)
    samples = make_samples()
    rewards = np.repeat(np.arange(9) % 3 - 1.0, samples.lengths) * samples.loss_mask
    batch = dataclasses.replace(samples, advantages=rewards.astype(np.float32))
    explained = [learner.train(share(batch)).figures["value/explained_fraction"] for _ in range(12)]
    assert explained[0] < 0.05 and explained[-1] > 0.5, explained


@pytest.mark.stack
def test_entropy_and_divergence_are_those_of_the_model(titan):
    objective = {"kl_weight": 1e-6, "entropy_metric": True}
    learner, samples = titan.make(objective=objective, lr=1e-2, temperature=0.7), make_samples(1)
    first, second = (learner.train(share(on_policy(samples, learner))) for _ in range(2))
    expected = titan.entropies(samples.token_ids, 0.7)[samples.loss_mask[1:]]
    assert first.figures["policy/entropy"] == pytest.approx(expected.mean(), rel=1e-5)
    assert first.figures["reference/kl"] == pytest.approx(0, abs=1e-9)
    assert second.figures["reference/kl"] > 1e-4
    assert second.figures["loss/kl"] == pytest.approx(1e-6 * second.figures["reference/kl"], rel=1e-5)


@pytest.mark.stack
def test_a_teacher_is_approached_without_any_reward(titan, tmp_path):
    teacher = make_model(tmp_path / "teacher", seed=1)
    learner = titan.make(objective={"weight": 0.0, "teacher": str(teacher)}, lr=3e-3)
    samples = dataclasses.replace(make_samples(), advantages=np.zeros_like(make_samples().advantages))
    apart = [learner.train(share(on_policy(samples, learner))).figures["teacher/kl"] for _ in range(6)]
    assert apart[-1] < 0.7 * apart[0], apart


@pytest.mark.stack
def test_a_teacher_with_another_tokenizer_is_refused(titan, tmp_path):
    teacher = make_model(tmp_path / "teacher")
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"], tokenizer["model"]["vocab"]["b"] = 11, 10
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"objective.teacher=.*another tokenizer.*token '[ab]' has id"):
        titan.make(objective={"teacher": str(teacher)})


@pytest.mark.stack
def test_in_later_updates_of_a_batch_the_ratio_moves_away_from_1(titan):
    samples = make_samples()
    for correction in ("decoupled", "aipo"):
        learner = titan.make(lr=3e-3, updates_per_batch=3, correction=correction)
        result = learner.train(share(on_policy(samples, learner)))
        assert result.figures["ratio/max"] > 1.05
        assert result.mismatch_kl < 1e-9, "measured at the step's start"
        assert learner.version == PolicyVersion(step=1)


def mini_batched(parts):
    """The share of a batch of these groups, each a mini-batch."""
    groups = [
        Group(index=index, prompt_id=PromptId(source="s", epoch=0, index=index), samples=samples, rewards=np.zeros(1))
        for index, samples in enumerate(parts)
    ]
    return split_batch(groups, 1, keep_zero_advantage=True, layout=Layout(mini_batches=len(parts)))[0]


@pytest.mark.stack
def test_each_mini_batch_is_an_update_of_its_own_with_its_own_denominators(titan):
    chosen = {"lr": 1e-4, "decay": "constant", "objective": {"denominator": "sequence_means"}}
    parts = [off_policy(make_samples(num, seed=num), titan.make()) for num in (5, 9)]
    one_by_one = titan.make(**chosen)
    results, weights = [one_by_one.train(share(part)) for part in parts], weights_of(one_by_one)
    learner = titan.make(**chosen, updates_per_batch=2)
    result = learner.train(mini_batched(parts))
    assert_close(weights_of(learner), weights)
    assert result.loss == pytest.approx(np.mean([each.loss for each in results]), rel=1e-5, abs=1e-6)
    assert result.num_loss_tokens == sum(part.num_loss_tokens for part in parts)
    assert result.version == PolicyVersion(step=1) and result.figures["staleness/extra_updates"] == 1
    tokens = [each.num_loss_tokens for each in results]
    mismatch = np.average([each.mismatch_kl for each in results], weights=tokens)
    assert result.mismatch_kl == pytest.approx(mismatch, rel=1e-4)


@pytest.mark.stack
def test_the_proximal_policy_of_every_mini_batch_is_that_of_the_steps_start(titan):
    learner = titan.make(lr=3e-3, updates_per_batch=2, correction="decoupled")
    parts = [on_policy(make_samples(seed=seed), learner) for seed in range(2)]
    result = learner.train(mini_batched(parts))
    assert result.figures["ratio/max"] > 1.02, "the second update begins away from the first one's start"


@pytest.mark.stack
def test_the_sample_whose_loss_is_not_finite_is_named(titan):
    learner, samples = titan.make(), make_samples()
    edges, advantages = samples.bounds(), samples.advantages.copy()
    advantages[edges[4] + 5] = np.inf
    with pytest.raises(NonFiniteError, match=r"groups 5\.\.5 are not finite \(the loss of sample 4 of group 5 is"):
        learner.train(share(dataclasses.replace(samples, advantages=advantages), micro_batch_tokens=16))


@pytest.mark.stack
def test_weights_are_published_in_the_policys_dtype(titan):
    learner = titan.make(publish_dtype="bfloat16")
    saved = read_weights(titan.folder)
    assert all((tensor == saved[name].bfloat16()).all() for name, tensor in weights_of(learner).items())


@pytest.fixture(scope="module")
def odd(children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("odd"), "qwen3_odd"))


def all_ranks(children, folder, **settings):
    """A rank of one learner in each child."""
    arguments, num = (str(folder), free_port()), len(children)
    return build_all(
        children,
        "tests.backends:titan_learner",
        [(arguments, {"rank": r, "ranks": num} | settings) for r in range(num)],
    )


@pytest.mark.stack
def test_two_ranks_train_as_one_and_their_shards_tile(odd, children):
    batches = [make_samples(seed=seed) for seed in range(2)]
    alone = odd.make(lr=1e-4)
    batches[0] = on_policy(batches[0], alone)
    results = [alone.train(share(samples)) for samples in batches]
    weights, digest = weights_of(alone), alone.digest()
    ranks = all_ranks(children, odd.folder, lr=1e-4)
    assert [(rank.batch_rank, rank.batch_ranks) for rank in ranks] == [(0, 2), (1, 2)]
    gpus = [child.build("tests.backends:own_device_of", "cuda").name for child in children[:2]]
    assert gpus == ["cuda:0", "cuda:0"], "each sees its own first, and maybe one that all share"
    for result, samples in zip(results, batches, strict=True):
        pair = call_all(ranks, "train", [(each,) for each in share(samples, 2)])
        for mine in pair:
            assert mine.loss == pytest.approx(result.loss, rel=1e-5)
            assert mine.grad_norm == pytest.approx(result.grad_norm, rel=1e-5)
            assert mine.num_loss_tokens == result.num_loss_tokens
            assert mine.logprob_diff_max == pytest.approx(result.logprob_diff_max, abs=1e-5)
        assert pair[0].num_row_tokens == pair[1].num_row_tokens >= samples.num_tokens - len(samples)
    parts = call_all(ranks, "snapshot", [(), ()])
    manifest = build_manifest(PolicyVersion(step=2), [Packed(part=part) for part, _ in parts])
    embedding = [shard.shape[0] for shard in manifest.by_name()["model.embed_tokens.weight"]]
    assert sorted(embedding) == [49, 50]
    assert_close(weights, unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(parts)}))
    digests = call_all(ranks, "digest", [(), ()])
    assert digests[0] == digests[1]
    assert len(digest) == len(digests[0])


@pytest.mark.stack
def test_two_ranks_agree_with_one_about_values_reference_and_entropy(odd, children):
    chosen = {"lr": 1e-4, "objective": EVERYTHING, "correction": "icepop", "updates_per_batch": 2}
    alone = odd.make(**chosen)
    batches = [off_policy(make_samples(seed=seed), alone) for seed in range(2)]
    results, weights = [alone.train(share(samples)) for samples in batches], weights_of(alone)
    ranks = all_ranks(children, odd.folder, **chosen, logit_chunk_tokens=9)
    for result, samples in zip(results, batches, strict=True):
        for mine in call_all(ranks, "train", [(each,) for each in share(samples, 2)]):
            assert mine.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)
            assert mine.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
            assert mine.figures == pytest.approx(result.figures, rel=1e-4, abs=1e-6)
    parts = call_all(ranks, "snapshot", [(), ()])
    manifest = build_manifest(PolicyVersion(step=2), [Packed(part=part) for part, _ in parts])
    assert_close(weights, unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(parts)}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.stack
def test_the_optimiser_waits_for_the_copy_of_what_it_changes_and_nothing_before_it_does(titan, dtype):
    folder, batches = str(titan.folder), [share(make_samples(seed=seed)) for seed in (0, 1)]
    subject = titan._child.build("tests.copying:titan_learner", folder, free_port(), publish_dtype=dtype)
    overtaken = subject.overtake(*batches)
    assert overtaken.copied_beside_backward, "the step waited for the copy before its forward and backward pass"
    assert overtaken.is_of_its_version, "the step changed what was being copied"
    assert overtaken.differs_from_the_next, "the step changed nothing, so that this test shows nothing"


def test_the_fakes_change_waits_for_the_copy_too():
    overtaken = Overtaking(FakeLearner()).overtake(share(make_samples()), share(make_samples(seed=1)))
    assert overtaken.is_of_its_version and overtaken.differs_from_the_next


@pytest.mark.stack
def test_a_checkpoint_of_two_ranks_is_gone_on_with_by_one_and_the_other_way_round(odd, children, tmp_path):
    chosen = {"lr": 1e-3, "objective": EVERYTHING, "correction": "icepop"}
    alone = odd.make(**chosen)
    alone.train(share(off_policy(make_samples(), alone)))
    alone.save_state(tmp_path / "one")
    digest, last = alone.digest(), off_policy(make_samples(seed=1), alone)
    result = alone.train(share(last))
    weights = weights_of(alone)
    ranks, version = all_ranks(children[:2], odd.folder, **chosen), PolicyVersion(incarnation=1, step=1)
    call_all(ranks, "restore", [(tmp_path / "one", version)] * 2)
    assert call_all(ranks, "digest", [(), ()]) == [digest] * 2
    call_all(ranks, "save_state", [(tmp_path / "two",)] * 2)
    for mine in call_all(ranks, "train", [(each,) for each in share(last, 2)]):
        assert mine.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)
        assert mine.figures == pytest.approx(result.figures, rel=1e-4, abs=1e-6)
    again = odd.make(**chosen)
    again.restore(tmp_path / "two", version)
    assert again.digest() == digest
    again.train(share(last))
    assert_close(weights, weights_of(again))


@pytest.mark.stack
def test_a_checkpoint_of_another_model_is_refused_and_one_without_values_gets_new_ones(titan, odd, tmp_path):
    titan.make().save_state(tmp_path / "state")
    with pytest.raises(LearnerError, match=r"another model or optimiser: \S+ is \(.*\) here, .*config.yaml"):
        odd.make().restore(tmp_path / "state", PolicyVersion(step=1))
    with_values = titan.make(objective={"name": "ppo"})
    with_values.restore(tmp_path / "state", PolicyVersion(step=1))
    assert with_values.train(share(make_samples())).version == PolicyVersion(step=2)


@pytest.mark.stack
def test_two_ranks_save_score_and_go_through_idle_and_refused_steps_together(odd, children, tmp_path):
    ranks = all_ranks(children, odd.folder)
    before = call_all(ranks, "digest", [(), ()])
    one_sample = share(make_samples(1), 2)
    assert one_sample[1].samples is None
    results = call_all(ranks, "train", [(each,) for each in one_sample])
    assert results[0].loss == results[1].loss
    bad = share(make_samples(advantage=np.nan), 2)
    after = call_all(ranks, "digest", [(), ()])
    assert after != before
    with pytest.raises(ExceptionGroup) as caught:
        call_all(ranks, "train", [(each,) for each in bad])
    assert [type(error) for error in caught.value.exceptions] == [NonFiniteError] * 2
    assert len({str(error) for error in caught.value.exceptions}) == 1, "every rank blames the same sample"
    assert "of group 5" in str(caught.value.exceptions[0])
    assert call_all(ranks, "digest", [(), ()]) == after
    call_all(ranks, "save", [(tmp_path / "model",)] * 2)
    tokens = np.arange(5, 30, dtype=np.int32)
    reference = Reference(tmp_path / "model")
    for (scored,) in call_all(ranks, "score", [([tokens],)] * 2):
        assert scored == pytest.approx(reference.logprobs(tokens), abs=1e-5)


@pytest.fixture(scope="module")
def four_children(children, tmp_path_factory):
    more = [Child(tmp_path_factory.mktemp("titan") / f"log{rank}") for rank in (2, 3)]
    yield [*children, *more]
    for child in more:
        child.close()


def published(ranks, step):
    """What the ranks put into the store, as one version."""
    parts = call_all(ranks, "snapshot", [()] * len(ranks))
    manifest = build_manifest(PolicyVersion(step=step), [Packed(part=part) for part, _ in parts])
    return manifest, {rank: blob for rank, (_, blob) in enumerate(parts)}


def assert_trains_as_one(subject, children, **chosen):
    """Ranks of a learner with tensor parallelism give the losses, gradients and weights of one rank."""
    alone = subject.make(**chosen)
    batches = [off_policy(make_samples(seed=seed), alone) for seed in range(2)]
    results, weights = [alone.train(share(samples)) for samples in batches], weights_of(alone)
    ranks = all_ranks(children, subject.folder, tensor_parallel=2, **chosen)
    num_shares = len(ranks) // 2
    assert [(rank.batch_rank, rank.batch_ranks) for rank in ranks] == [(r // 2, num_shares) for r in range(len(ranks))]
    for result, samples in zip(results, batches, strict=True):
        shares = share(samples, num_shares) if num_shares > 1 else [share(samples)]
        for mine in call_all(ranks, "train", [(shares[number // 2],) for number in range(len(ranks))]):
            assert mine.loss == pytest.approx(result.loss, rel=1e-5, abs=1e-6)
            assert mine.grad_norm == pytest.approx(result.grad_norm, rel=1e-4)
            assert mine.figures == pytest.approx(result.figures, rel=1e-4, abs=1e-6)
            assert mine.num_loss_tokens == result.num_loss_tokens
    manifest, blobs = published(ranks, step=2)
    assert_close(weights, unpack(manifest, blobs))
    assert max(blob.numel() for blob in blobs.values()) < 0.6 * manifest.num_bytes, "no rank publishes the whole model"
    return ranks, manifest


def assert_saved_by_all(ranks, folder):
    """The folder that the ranks write is a model that transformers loads, with the same logits."""
    call_all(ranks, "save", [(folder,)] * len(ranks))
    tokens = np.arange(5, 30, dtype=np.int32)
    expected = Reference(folder).logprobs(tokens)
    for (scored,) in call_all(ranks, "score", [([tokens],)] * len(ranks)):
        assert scored == pytest.approx(expected, abs=1e-5)
    assert len(set(call_all(ranks, "digest", [()] * len(ranks)))) == 1


@pytest.mark.stack
def test_two_tensor_parallel_ranks_train_as_one(children, tmp_path):
    """Vocabulary, heads and hidden rows are cut; the logits too, in chunks. The embedding is tied, its cut uneven."""
    subject = TitanSubject(children[0], make_model(tmp_path / "model", "qwen3_wide"))
    ranks, manifest = assert_trains_as_one(subject, children, lr=1e-4, logit_chunk_tokens=9)
    by_name = manifest.by_name()
    assert [each.shape for each in by_name["model.embed_tokens.weight"]] == [(50, 64), (49, 64)]
    assert [each.shape for each in by_name["model.layers.0.self_attn.o_proj.weight"]] == [(64, 64)] * 2
    assert [each.rank for each in by_name["model.norm.weight"]] == [0], "what both hold, one publishes"
    assert_saved_by_all(ranks, tmp_path / "saved")


@pytest.mark.stack
@pytest.mark.long
def test_four_ranks_train_as_one_with_fsdp_over_tensor_parallelism(four_children, tmp_path):
    subject = TitanSubject(four_children[0], make_model(tmp_path / "model", "llama_wide_untied"))
    chosen = {"objective": EVERYTHING, "correction": "icepop", "updates_per_batch": 2, "logit_chunk_tokens": 9}
    ranks, manifest = assert_trains_as_one(subject, four_children, lr=1e-4, **chosen)
    head = [(each.rank, each.offsets[0], each.shape[0]) for each in manifest.by_name()["lm_head.weight"]]
    assert head == [(0, 0, 25), (1, 50, 25), (2, 25, 25), (3, 75, 24)]
    assert_saved_by_all(ranks, tmp_path / "saved")
