"""What the tiny warm start is, and where it is kept; making it is for `tests/e2e`."""

from __future__ import annotations

import dataclasses

import pytest

from forge_async.backends.tiny_model import TinyMixture
from forge_async.config import Config
from forge_async.runtime.warm_start import WARM_STARTS, _recipe, _target


@pytest.mark.parametrize("task", WARM_STARTS)
def test_a_mixture_is_the_dense_model_with_experts_in_its_layers(task):
    dense, moe = (_recipe(Config.of({"task.name": task, "model.tiny": tiny})) for tiny in ("dense", "moe"))
    assert dense is WARM_STARTS[task] and isinstance(moe.shape, TinyMixture)
    assert moe.shape.expert_ffn % 32 == 0 and moe.shape.experts_per_token < moe.shape.experts
    sizes = dataclasses.asdict(dense.shape)
    assert {key: value for key, value in dataclasses.asdict(moe.shape).items() if key in sizes} == sizes


def test_each_kind_has_a_folder_of_its_own():
    folders = {_target(Config.of({"task.name": "sum", "model.tiny": tiny})) for tiny in ("dense", "moe")}
    assert len(folders) == 2
