"""Adapters as they travel: names, the product with the weights below, PEFT's folder; versions that build on others."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from forge_async.backends.folder_engine import weights_of
from forge_async.core.errors import ConfigError, WeightsError
from forge_async.weights.adapters import base_folder, is_adapter, layer_of, merge_all, merged, pairs, read_peft

LAYER = "model.layers.0.self_attn.q_proj"


def adapter(rank=2, out=6, width=4, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return {
        f"{LAYER}.lora_A.weight": torch.randn(rank, width, generator=draws),
        f"{LAYER}.lora_B.weight": torch.randn(out, rank, generator=draws),
    }


def test_an_adapters_names_say_what_it_lies_on():
    for name in adapter():
        assert is_adapter(name)
        assert layer_of(name) == f"{LAYER}.weight"
    assert not is_adapter(f"{LAYER}.weight")


def test_a_matrix_without_its_other_half_is_refused():
    for name in adapter():
        with pytest.raises(WeightsError, match="only one of its two matrices"):
            list(pairs({name: adapter()[name]}))


def test_merged_is_computed_in_float32_and_rounded_once():
    weights = torch.randn(6, 4).bfloat16()
    ((_, a, b),) = pairs(adapter())
    expected = (weights.double() + b.double() @ a.double()).float()
    assert merged(weights.float(), a, b) == pytest.approx(expected, abs=1e-6)
    assert merged(weights, a, b).equal(merged(weights.float(), a, b).bfloat16())


def test_merging_boxes_is_a_box_of_what_is_merged():
    weights, ((_, a, b),) = torch.randn(6, 4), pairs(adapter())
    whole = merged(weights, a, b)
    assert merged(weights[2:5, 1:3], a[:, 1:3], b[2:5]) == pytest.approx(whole[2:5, 1:3], abs=1e-6)


def test_merging_leaves_other_weights_and_the_frozen_ones_alone():
    frozen, other = torch.randn(6, 4), torch.randn(3)
    before = frozen.clone()
    found = merge_all({f"{LAYER}.weight": frozen, "norm.weight": other}, adapter())
    assert found["norm.weight"] is other
    assert frozen.equal(before)
    assert not found[f"{LAYER}.weight"].equal(before)


@pytest.mark.parametrize("weights", [{}, {f"{LAYER}.weight": torch.zeros(6, 5)}])
def test_an_adapter_of_another_model_is_refused(weights):
    with pytest.raises(WeightsError, match=r"is for weights of shape \(6, 4\).*that it was trained on"):
        merge_all(weights, adapter())


def peft_folder(tmp_path, **settings):
    folder, base = tmp_path / "adapter", tmp_path / "base"
    for each in (folder, base):
        each.mkdir(exist_ok=True)
    (base / "config.json").write_text("{}")
    save_file({f"{LAYER}.weight": torch.ones(6, 4), "norm.weight": torch.ones(3)}, base / "model.safetensors")
    matrices = {f"base_model.model.{name}": each for name, each in adapter().items()}
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"r": 2, "lora_alpha": 6, "base_model_name_or_path": str(base)} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("settings", "scale"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5)], ids=str)
def test_a_peft_folder_is_read_with_its_scale_in_b(tmp_path, settings, scale):
    found = read_peft(peft_folder(tmp_path, **settings))
    assert found.keys() == adapter().keys()
    assert found[f"{LAYER}.lora_A.weight"].equal(adapter()[f"{LAYER}.lora_A.weight"])
    assert found[f"{LAYER}.lora_B.weight"] == pytest.approx(adapter()[f"{LAYER}.lora_B.weight"] * scale, rel=1e-6)


def test_whoever_reads_a_peft_folder_as_a_model_gets_what_it_means(tmp_path):
    found = dict(weights_of(peft_folder(tmp_path)))
    a, b = adapter().values()
    assert found[f"{LAYER}.weight"] == pytest.approx(1 + 3 * b @ a, abs=1e-5)
    assert found["norm.weight"].equal(torch.ones(3))


@pytest.mark.parametrize(
    "settings", [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 4}}, {"modules_to_save": ["lm_head"]}]
)
def test_an_adapter_of_another_kind_is_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))}=.*not supported"):
        read_peft(peft_folder(tmp_path, **settings))


def test_a_missing_base_is_named(tmp_path):
    folder = peft_folder(tmp_path, base_model_name_or_path="somewhere/else")
    with pytest.raises(ConfigError, match=r"for the model somewhere/else, which is no folder.*base_model_name_or_path"):
        base_folder(folder)
