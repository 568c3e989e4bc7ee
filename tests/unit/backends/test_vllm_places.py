"""Where an engine keeps parameters, on a model that is none of vLLM's but is laid out like one."""

import pytest
import torch

from forge_async.backends.vllm_places import Places
from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion

NORM, QUERY, KEY, DOWN = "norm.weight", "attn.q_proj.weight", "attn.k_proj.weight", "mlp.down_proj.weight"
OLD, NEW = PolicyVersion(step=1), PolicyVersion(step=2)


def layer(dtype, rows, columns, parts=()):
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(torch.zeros(rows, columns, dtype=dtype), requires_grad=False)
    if parts:
        made.output_sizes = list(parts)
    return made


def model(dtype):
    """One fused layer and one that is not, in this dtype, and a norm in float32."""
    whole, attn, mlp = (torch.nn.Module() for _ in range(3))
    attn.qk_proj, mlp.down_proj = layer(dtype, 6, 6, (4, 2)), layer(dtype, 6, 6)
    whole.attn, whole.mlp, whole.norm = attn, mlp, torch.nn.LayerNorm(6, bias=False)
    whole.packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}
    return whole


def weights():
    rows = {NORM: (6,), QUERY: (4, 6), KEY: (2, 6), DOWN: (6, 6)}
    return {name: torch.full(shape, float(at)) for at, (name, shape) in enumerate(rows.items(), 1)}


def test_each_parameter_is_written_to_its_place_and_read_back():
    places = Places(model(torch.float32))
    places.check(weights(), NEW, OLD)
    places.write(weights())
    assert {name: each.unique().tolist() for name, each in places.read(weights())} == {
        NORM: [1.0], QUERY: [2.0], KEY: [3.0], DOWN: [4.0]
    }  # fmt: skip


def test_what_is_sealed_has_no_place_although_a_kernel_keeps_packed_weights_under_its_name():
    sealed = frozenset([QUERY, KEY, DOWN])
    with pytest.raises(WeightsError, match=f"policy@0.2 has {QUERY} .* the engine holds torch.int8"):
        Places(model(torch.int8)).check(weights(), NEW, OLD)
    places = Places(model(torch.int8), sealed)
    places.check(weights(), NEW, OLD)
    assert [name for name, _ in places.read(weights())] == [NORM]
