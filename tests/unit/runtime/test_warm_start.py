"""What the tiny warm start is, and where it is kept; making it is for `tests/e2e`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from forge_async.backends.tiny_model import TinyMixture
from forge_async.config import Config
from forge_async.runtime.warm_start import WARM_STARTS, _recipe, _target, _words


@pytest.mark.parametrize("task", WARM_STARTS)
def test_a_mixture_is_the_dense_model_with_experts_in_its_layers(task):
    dense, moe = (_recipe(Config.of({"task.name": task, "model.tiny": tiny})) for tiny in ("dense", "moe"))
    assert dense is WARM_STARTS[task] and isinstance(moe.shape, TinyMixture)
    assert moe.shape.expert_ffn % 32 == 0 and moe.shape.experts_per_token < moe.shape.experts
    sizes = dataclasses.asdict(dense.shape)
    assert {key: value for key, value in dataclasses.asdict(moe.shape).items() if key in sizes} == sizes


def test_the_default_start_is_the_one_that_caches_and_figures_in_the_documents_are_of():
    assert _target(Config.of({})).name == "spell-26118dcac500"


def test_sums_are_taught_by_more_than_the_few_that_may_be_shown():
    config = Config.of({"task.name": "sum", "task.options": {"min_terms": 3}})
    words = _words(config, _recipe(config), Path("/here"))
    assert 'task.options={"max_terms": 3, "min_terms": 3}' in words, "beside what the user asks of the task"
    assert 'task.name="sum"' in words and "sft.batch_samples=128" in words
    plain = Config.of({})
    assert not any(word.startswith("task.options") for word in _words(plain, _recipe(plain), Path("/here")))


def test_each_kind_has_a_folder_of_its_own():
    folders = {_target(Config.of({"task.name": "sum", "model.tiny": tiny})) for tiny in ("dense", "moe")}
    assert len(folders) == 2
