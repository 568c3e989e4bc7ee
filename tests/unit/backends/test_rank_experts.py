"""Slices of experts that ranks of an engine hold, and a load into them; with modules that look like vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forge_async.backends.vllm_experts import ExpertPlace, write
from forge_async.backends.vllm_layout import held_boxes
from forge_async.backends.vllm_rank_weights import RankWeights
from forge_async.core.errors import PolicyError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import build_manifest
from forge_async.weights.packing import LocalShard, Transfer, pack

HIDDEN, SIZE, PADDED, EXPERTS = 4, 6, 5, 2
"""Of an expert; `PADDED`: a rank's half of SIZE with what its kernel adds."""
SHAPES = {"gate_proj": (SIZE, HIDDEN), "up_proj": (SIZE, HIDDEN), "down_proj": (HIDDEN, SIZE)}
DRAWS = torch.Generator().manual_seed(0)
MODEL = {
    f"layers.0.mlp.experts.{expert}.{matrix}.weight": torch.randn(shape, generator=DRAWS)
    for expert in range(EXPERTS)
    for matrix, shape in SHAPES.items()
} | {"layers.0.norm.weight": torch.randn(HIDDEN, generator=DRAWS)}


def engine_model(num_local=EXPERTS):
    """A rank's model, and its experts, whose parameters are plain matrices; beside them there is a norm."""
    experts: Any = torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * PADDED, HIDDEN), requires_grad=False)
    experts.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, HIDDEN, PADDED), requires_grad=False)
    experts.local_num_experts, experts.global_num_experts = num_local, EXPERTS
    experts.moe_config = SimpleNamespace(
        tp_size=2, intermediate_size=SIZE, hidden_dim=HIDDEN, hidden_dim_unpadded=HIDDEN
    )
    experts.quant_method = SimpleNamespace(
        moe_kernel=SimpleNamespace(fused_experts=object()), unquantized_backend=SimpleNamespace(name="TRITON")
    )
    mlp = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"routed_experts": experts})})
    layer = torch.nn.ModuleDict({"mlp": mlp, "norm": torch.nn.LayerNorm(HIDDEN, bias=False)})
    return torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}), experts


def by_rows(weights):
    """What two ranks of a learner publish, each parameter cut unevenly by rows."""
    ranks = [], []
    for name, tensor in weights.items():
        for rank, part in enumerate((tensor[:1], tensor[1:])):
            offsets = (rank, *[0] * (tensor.dim() - 1))
            ranks[rank].append(LocalShard(name=name, tensor=part, global_shape=tuple(tensor.shape), offsets=offsets))
    return ranks


def load(held, shards_of_ranks):
    packed, blobs = zip(*(pack(shards, rank) for rank, shards in enumerate(shards_of_ranks)), strict=True)
    transfer = Transfer([each.box for each in held], shared=False)
    transfer.follow(build_manifest(PolicyVersion(step=1), list(packed)).layout)
    write(transfer.targets([each.place for each in held]), transfer.sources(dict(enumerate(blobs))))
    return transfer.plan


def test_what_two_ranks_were_given_of_experts_makes_up_the_whole():
    (first, experts), (second, _) = engine_model(), engine_model()
    ranks = [held_boxes(first, 0), held_boxes(second, 1)]
    plan, _ = (load(held, by_rows(MODEL)) for held in ranks)
    read = [[(each.box, each.read()) for each in held] for held in ranks]
    assert all(box.is_whole == ("norm" in box.name) for boxes in read for box, _ in boxes)
    handle: Any = SimpleNamespace(num_ranks=2, call=lambda method, names: read)
    together = dict(RankWeights(handle, [[box for box, _ in boxes] for boxes in read]).read(MODEL))
    assert together.keys() == MODEL.keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in MODEL.items())
    copied = sum(torch.Size(copy.shape).numel() for copy in plan.copies)
    assert copied == sum(each.numel() for each in MODEL.values()) / 2 + HIDDEN / 2, "a rank takes no more than its own"
    assert not experts.w13_weight[:, SIZE // 2 : PADDED].any() and not experts.w2_weight[:, :, SIZE // 2 :].any()


def test_a_rank_lays_its_rows_and_columns_where_vllm_reads_them():
    model, experts = engine_model()
    load(held_boxes(model, 1), by_rows(MODEL))
    half = SIZE // 2
    for expert in range(EXPERTS):
        gate, up, down = (MODEL[f"layers.0.mlp.experts.{expert}.{matrix}.weight"] for matrix in SHAPES)
        assert torch.equal(experts.w13_weight[expert, :half], gate[half:])
        assert torch.equal(experts.w13_weight[expert, PADDED : PADDED + half], up[half:])
        assert torch.equal(experts.w2_weight[expert, :, :half], down[:, half:])


def test_a_box_of_rearranged_elements_is_written_alone():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0)).view(3, 4)
    layer = SimpleNamespace(w=torch.nn.Parameter(torch.zeros(1, 12), requires_grad=False))
    place = ExpertPlace(layer=layer, parameter="w", expert=0, places=order)
    box = torch.arange(1.0, 5.0).view(2, 2)
    place[1:3, 2:4].write(box)
    assert torch.equal(place[1:3, 2:4].read(), box)
    assert torch.equal(place.read().nonzero(), torch.tensor([[1, 2], [1, 3], [2, 2], [2, 3]]))


def test_whole_experts_spread_over_ranks_are_refused():
    with pytest.raises(PolicyError, match=r"whole experts of layers\.0\.mlp\.experts\.routed_experts over the ranks"):
        held_boxes(engine_model(num_local=1)[0], 0)
