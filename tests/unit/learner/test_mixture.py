"""Which layers are mixtures, and how evenly their experts are used."""

from __future__ import annotations

import numpy as np
import pytest

from forge_async.learner.mixture import has_experts, load_figures, num_experts


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"mlp_only_layers": [1]}, [0, 2, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
    ],
)
def test_layers_are_mixtures_by_the_rule_of_transformers(config, layers):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

    sizes = {"hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    theirs = Qwen3MoeConfig(num_hidden_layers=4, num_experts=2, moe_intermediate_size=32, **sizes, **config)
    blocks = [Qwen3MoeDecoderLayer(theirs, number).mlp for number in range(4)]
    assert [number for number in range(4) if has_experts(config, number)] == layers
    assert [number for number, block in enumerate(blocks) if isinstance(block, Qwen3MoeSparseMoeBlock)] == layers


def test_the_number_of_experts_has_two_names():
    assert num_experts({"num_experts": 8}) == num_experts({"num_local_experts": 8}) == 8


def test_an_even_use_has_all_the_entropy_and_a_single_expert_none():
    assert load_figures(np.full((2, 4), 7)) == {"router/share_max": 0.25, "router/entropy_fraction": pytest.approx(1)}
    alone = load_figures(np.array([[0, 9, 0, 0]]))
    assert alone == {"router/share_max": 1.0, "router/entropy_fraction": 0.0}


def test_the_share_is_of_the_worst_layer_and_the_entropy_of_all():
    found = load_figures(np.array([[1, 1], [3, 1]]))
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(2)
    assert found == {"router/share_max": 0.75, "router/entropy_fraction": pytest.approx((1 + entropy) / 2)}


def test_nothing_is_said_of_layers_without_tokens():
    assert load_figures(np.zeros((2, 4))) == {}
