"""The real learner with adapters: what it trains, what it publishes, what it saves; on one rank and on two."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forge_async.core.errors import LearnerError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.adapters import is_adapter, merge_all, pairs, read_peft
from forge_async.weights.manifest import Packed, build_manifest
from forge_async.weights.packing import unpack
from tests.child import build_all, call_all
from tests.contract.test_learner import (
    TitanSubject,
    assert_close,
    free_port,
    make_samples,
    on_policy,
    share,
    weights_of,
)
from tests.models import Reference, make_model, merge_by_hand, read_weights

pytestmark = [pytest.mark.timeout(180), pytest.mark.stack]

LORA = {"rank": 4, "alpha": 6.0, "targets": ["q_proj", "v_proj", "o_proj", "down_proj"]}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LR = 1e-2


@pytest.fixture(scope="module")
def titan(children, tmp_path_factory):
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("qwen3")))


def batches(learner, steps):
    """Batches that the learner itself has sampled, one after the other."""
    for step in range(steps):
        yield on_policy(make_samples(seed=step), learner)


def test_only_adapters_are_trained_and_all_of_them_are_in_the_state_dict(titan, children):
    learner = titan.make(lora=LORA)
    before = weights_of(learner)
    learner.train(share(make_samples()))
    found = children[0].build("tests.backends:Insides").trained()
    adapters = [name for name in found["state_dict"] if "lora" in name]
    assert len(adapters) == 2 * 2 * len(LORA["targets"]), "two layers, two matrices each"
    assert found["gradient"] == found["optimizer"] == adapters
    learner.forget_base()
    after = weights_of(learner)
    changed = {name for name in after if (after[name] != before[name]).any()}
    assert changed == {name for name in after if name.endswith("lora_B.weight")}, "A has no gradient while B is 0"


def test_without_a_step_adapters_change_nothing(titan):
    tokens = np.arange(5, 40, dtype=np.int32)
    assert titan.make(lora=LORA).score([tokens])[0] == pytest.approx(titan.logprobs(tokens), abs=1e-5)


def test_steps_are_those_of_a_model_made_by_hand(titan):
    """W + s B A in transformers, differentiated by torch and stepped by torch's AdamW: the same A and B."""
    import torch

    learner = titan.make(lora=LORA, lr=LR)
    model, base = Reference(titan.folder).model, read_weights(titan.folder)
    halves = {name: value.clone().requires_grad_() for name, value in weights_of(learner).items() if is_adapter(name)}
    optimizer = torch.optim.AdamW(halves.values(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for batch in batches(learner, 3):
        result = learner.train(share(batch))
        whole = {name: base[name] + LORA["alpha"] / LORA["rank"] * b @ a for name, a, b in pairs(halves)}
        loss = by_hand(model, whole, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(halves.values(), 1.0)
        assert result.loss == pytest.approx(loss.item(), abs=1e-5)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-4)
        optimizer.param_groups[0]["lr"] = result.lr
        optimizer.step()
    trained = weights_of(learner)
    assert trained.keys() == halves.keys(), "after the first snapshot only adapters are published"
    scale = LORA["alpha"] / LORA["rank"]
    expected = {name: each.detach() * (scale if "lora_B" in name else 1) for name, each in halves.items()}
    assert_close(trained, expected, rel=2e-3)


def by_hand(model, weights, batch):
    """The policy gradient's loss on what the model itself has sampled: -mean(advantage x log-probability)."""
    import torch

    edges, terms = batch.bounds(), []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        ids = torch.from_numpy(batch.token_ids[begin:end].astype(np.int64))
        logits = torch.func.functional_call(model, weights, (ids[None],)).logits[0]
        logprobs = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        ratio = torch.exp(logprobs - torch.from_numpy(batch.logprobs[begin + 1 : end]))
        advantages = torch.from_numpy(batch.advantages[begin + 1 : end])
        terms.append(-(ratio * advantages)[torch.from_numpy(batch.loss_mask[begin + 1 : end])])
    return torch.cat(terms).mean()


def test_packed_and_padded_rows_train_the_same_adapters(titan):
    found = []
    for layout in ({"row_tokens": 512}, {"packed": False}, {"row_tokens": 8, "micro_batch_tokens": 16}):
        learner = titan.make(lora=LORA, lr=1e-3)
        results = [learner.train(share(batch, **layout)) for batch in batches(learner, 2)]
        learner.forget_base()
        found.append(([(each.loss, each.grad_norm) for each in results], weights_of(learner)))
    for figures, weights in found[1:]:
        assert np.allclose(figures, found[0][0], rtol=1e-4, atol=1e-6)
        assert_close(found[0][1], weights, rel=1e-4)


@pytest.fixture(scope="module")
def on_two_ranks(children, titan, tmp_path_factory):
    """After two steps of the same batches: on one rank and on two, the whole snapshot, the adapters, what is merged."""
    found, same = {}, {"lora": LORA, "lr": 1e-3}
    for merges in (False, True):
        one, port = titan.make(merge_adapters=merges, **same), free_port()
        samples = list(batches(one, 1)) * 2
        singly = [one.train(share(each)) for each in samples]
        found["one", merges] = [weights_of(one) for _ in range(2)]
        one.save(tmp_path_factory.mktemp("saved") / "one")
        ranks = build_all(
            children,
            "tests.backends:titan_learner",
            [
                ((str(titan.folder), port), {"rank": rank, "ranks": 2, "merge_adapters": merges, **same})
                for rank in (0, 1)
            ],
        )
        doubly = [call_all(ranks, "train", [(each,) for each in share(samples[0], 2)])[0] for _ in samples]
        assert [each.loss for each in doubly] == pytest.approx([each.loss for each in singly], rel=1e-5, abs=1e-6)
        for _ in range(2):
            packed = call_all(ranks, "snapshot", [(), ()])
            parts = [Packed(part=part) for part, _ in packed]
            blobs = {rank: blob for rank, (_, blob) in enumerate(packed)}
            found.setdefault(("two", merges), []).append(unpack(build_manifest(one.version, parts), blobs))
        if not merges:
            packed = call_all(ranks, "whole", packed)
            parts, blobs = [Packed(part=part) for part, _ in packed], {0: packed[0][1], 1: packed[1][1]}
            found["whole again"] = unpack(build_manifest(one.version, parts), blobs)
        folder = tmp_path_factory.mktemp("saved2") / "two"
        call_all(ranks, "save", [(folder,), (folder,)])
        found["folder", merges] = folder
    return found


def test_two_ranks_train_and_publish_what_one_does(on_two_ranks):
    for merges in (False, True):
        for one, two in zip(on_two_ranks["one", merges], on_two_ranks["two", merges], strict=True):
            assert_close(one, two, rel=1e-4)


def test_the_first_snapshot_is_whole_and_the_next_are_adapters_only(on_two_ranks, titan):
    first, second = on_two_ranks["two", False]
    base = read_weights(titan.folder)
    assert {name for name in first if not is_adapter(name)} == set(base)
    assert all((first[name] == tensor).all() for name, tensor in base.items()), "what is frozen is as it was"
    assert set(second) == {name for name in first if is_adapter(name)}
    assert all((first[name] == tensor).all() for name, tensor in second.items())


def test_a_snapshot_of_adapters_becomes_the_whole_version_that_it_was_of(on_two_ranks, titan):
    """Bit for bit, though the parameters have moved on: a store that is started anew has nothing that lies below."""
    first, _ = on_two_ranks["two", False]
    assert on_two_ranks["whole again"].keys() == first.keys()
    assert all((on_two_ranks["whole again"][name] == tensor).all() for name, tensor in first.items())
    learner = titan.make(lora=LORA, lr=LR)
    frozen = {name: tensor for name, tensor in weights_of(learner).items() if not is_adapter(name)}
    older = None
    for batch in batches(learner, 2):
        learner.train(share(batch))
        older = older or learner.snapshot()
    version = PolicyVersion(step=1)
    adapters = unpack(build_manifest(version, [Packed(part=older[0])]), {0: older[1]})
    part, blob = learner.whole(*older)
    whole = unpack(build_manifest(version, [Packed(part=part)]), {0: blob})
    assert whole.keys() == frozen.keys() | adapters.keys()
    assert all((whole[name] == tensor).all() for name, tensor in (frozen | adapters).items())
    assert any((weights_of(learner)[name] != tensor).any() for name, tensor in adapters.items())


def test_merged_snapshots_are_whole_each_time_and_of_what_the_adapters_give(on_two_ranks):
    whole, _ = on_two_ranks["two", False]
    base = {name: each for name, each in whole.items() if not is_adapter(name)}
    expected = merge_all(base, {name: each for name, each in whole.items() if is_adapter(name)})
    assert any((expected[name] != base[name]).any() for name in base)
    for snapshot in on_two_ranks["two", True]:
        assert_close(snapshot, expected, rel=1e-4)


def test_what_is_saved_is_read_as_what_the_learner_computes(on_two_ranks, titan, tmp_path):
    """The PEFT folder, merged by hand, and the folder with merged weights: the logits of both, in transformers."""
    folder, tokens = on_two_ranks["folder", False], np.arange(5, 60, dtype=np.int32)
    by_hand_folder = merge_by_hand(folder, tmp_path / "merged")
    one, other = (Reference(each).logits(tokens) for each in (by_hand_folder, on_two_ranks["folder", True]))
    assert np.abs(one - other).max() < 1e-5
    assert np.abs(one - Reference(titan.folder).logits(tokens)).max() > 1e-3, "training changed something"
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (4, 6.0, sorted(LORA["targets"]))
    assert (folder / "tokenizer.json").exists()
    assert not (folder / "model.safetensors").exists()
    assert_close(merge_all(read_weights(titan.folder), read_peft(folder)), read_weights(by_hand_folder))


@pytest.mark.parametrize("kind", ["qwen3_untied", "llama"])
def test_a_saved_adapter_gives_the_learners_logits(children, tmp_path, kind):
    subject = TitanSubject(children[0], make_model(tmp_path / "base", kind))
    learner, tokens = subject.make(lora={**LORA, "targets": ALL}, lr=LR), np.arange(5, 60, dtype=np.int32)
    for batch in batches(learner, 2):
        learner.train(share(batch))
    learner.save(tmp_path / "adapter")
    merged = Reference(merge_by_hand(tmp_path / "adapter", tmp_path / "merged"))
    assert learner.score([tokens])[0] == pytest.approx(merged.logprobs(tokens), abs=1e-5)
    assert np.abs(merged.logprobs(tokens) - subject.logprobs(tokens)).max() > 1e-3
    # A run that starts from the adapter's folder starts from what it means.
    again = TitanSubject(children[0], merge_by_hand(tmp_path / "adapter", tmp_path / "merged again"))
    again.folder = tmp_path / "adapter"
    assert again.make().score([tokens])[0] == pytest.approx(merged.logprobs(tokens), abs=1e-5)


def test_the_reference_of_a_divergence_is_the_model_without_adapters(titan):
    """Far from where it began, with no second copy: what transformers gives for the base."""
    learner = titan.make(lora=LORA, lr=LR, objective={"kl_weight": 1e-6})
    samples = make_samples()
    found = [learner.train(share(on_policy(samples, learner))).figures["reference/kl"] for _ in range(3)]
    now = on_policy(samples, learner)
    last = learner.train(share(now)).figures["reference/kl"]
    edges = samples.bounds()
    sequences = [samples.token_ids[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    base = np.concatenate([[0.0, *titan.logprobs(each)] for each in sequences])
    apart = (now.logprobs - base)[samples.loss_mask]
    assert found[0] == pytest.approx(0, abs=1e-6)
    assert last == pytest.approx((np.exp(-apart) - 1 + apart).mean(), rel=1e-3)
    assert last > 1e-2


def test_a_learner_with_adapters_goes_on_where_it_was(titan, tmp_path):
    learner = titan.make(lora=LORA, lr=LR)
    batch = [make_samples(seed=seed) for seed in range(3)]
    for each in batch[:2]:
        learner.train(share(each))
    learner.save_state(tmp_path / "state")
    learner.train(share(batch[2]))
    after, version = learner.digest(), PolicyVersion(incarnation=1, step=2)
    learner = titan.make(lora=LORA, lr=LR)
    learner.restore(tmp_path / "state", version)
    assert {is_adapter(name) for name in weights_of(learner)} == {True, False}, "its first snapshot is whole"
    learner.train(share(batch[2]))
    assert learner.digest() == after


@pytest.fixture(scope="module")
def of_many_words(children, tmp_path_factory):
    """A model beside which its adapters are small."""
    return TitanSubject(children[0], make_model(tmp_path_factory.mktemp("words"), vocabulary=20_000))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("merges", [False, True])
def test_a_checkpoint_holds_what_training_changes_and_goes_on_bit_for_bit(of_many_words, tmp_path, merges):
    make = {"lora": LORA, "lr": LR, "merge_adapters": merges}
    learner, batch = of_many_words.make(**make), [make_samples(seed=seed) for seed in range(3)]
    for each in batch[:2]:
        learner.train(share(each))
    learner.save_state(tmp_path / "state")
    whole = (of_many_words.folder / "model.safetensors").stat().st_size
    assert size_of(tmp_path / "state") < whole / 20
    learner.train(share(batch[2]))
    after = learner.digest()
    learner = of_many_words.make(**make)
    learner.restore(tmp_path / "state", PolicyVersion(incarnation=1, step=2))
    learner.train(share(batch[2]))
    assert learner.digest() == after


def test_adapters_do_not_go_on_over_another_model(titan, tmp_path):
    learner = titan.make(lora=LORA)
    learner.save_state(tmp_path / "state")
    other = TitanSubject(titan._child, make_model(tmp_path / "other", seed=1)).make(lora=LORA)
    with pytest.raises(LearnerError, match=r"trained on other weights than those that model\.path has now; give the"):
        other.restore(tmp_path / "state", PolicyVersion(step=0))


def test_two_ranks_go_on_from_adapters_that_one_has_saved(children, titan, tmp_path):
    one, port = titan.make(lora=LORA, lr=LR), free_port()
    one.train(share(make_samples()))
    one.save_state(tmp_path / "state")
    expected, version = weights_of(one), PolicyVersion(incarnation=1, step=1)
    ranks = build_all(
        children,
        "tests.backends:titan_learner",
        [((str(titan.folder), port), {"rank": rank, "ranks": 2, "lora": LORA, "lr": LR}) for rank in (0, 1)],
    )
    call_all(ranks, "restore", [(tmp_path / "state", version)] * 2)
    packed = call_all(ranks, "snapshot", [(), ()])
    manifest = build_manifest(version, [Packed(part=part) for part, _ in packed])
    found = unpack(manifest, {rank: blob for rank, (_, blob) in enumerate(packed)})
    assert found.keys() == expected.keys()
    assert all((found[name] == tensor).all() for name, tensor in expected.items())
