"""Law 5 between layouts: however learner and readers cut a model, each reader ends with its own boxes, bit for bit."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.manifest import build_manifest
from forge_async.weights.packing import LocalShard, Transfer, pack
from forge_async.weights.reshard import Wanted, compile_plan

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
models = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4)


def lines(size, num_parts, draw):
    """Where a dimension is cut: uneven, some parts perhaps empty."""
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=num_parts - 1, max_size=num_parts - 1)))
    return list(itertools.pairwise([0, *inner, size]))


def cut(model, draw, *, replicate):
    """A mesh of ranks, each with its boxes (name, offsets, shape): every parameter is cut along some dimensions of the
    mesh, and held along the others by one rank, or with `replicate` by all."""
    mesh = draw(st.sampled_from([(1,), (2,), (3,), (2, 2)]))
    ranks = {place: [] for place in itertools.product(*map(range, mesh))}
    for name, tensor in model.items():
        dims = st.integers(0, tensor.dim() - 1) if tensor.dim() else st.none()
        cut_along = [draw(st.none() | dims) for _ in mesh]
        cut_along = [None if dim in cut_along[:at] else dim for at, dim in enumerate(cut_along)]
        parts = [
            None if dim is None else lines(tensor.shape[dim], size, draw)
            for dim, size in zip(cut_along, mesh, strict=True)
        ]
        for place, boxes in ranks.items():
            extents = [(0, size) for size in tensor.shape]
            for at, dim, of in zip(place, cut_along, parts, strict=True):
                if dim is not None:
                    extents[dim] = of[at]
            if replicate or not any(at for at, dim in zip(place, cut_along, strict=True) if dim is None):
                boxes.append((name, tuple(low for low, _ in extents), tuple(high - low for low, high in extents)))
    return list(ranks.values())


@st.composite
def two_layouts(draw):
    """(model, boxes of each learner rank, boxes of each reader)."""
    model = {
        f"p{i}": torch.randint(-99, 99, shape).to(dtype) for i, (shape, dtype) in enumerate(draw(models))
    }  # fmt: skip
    return model, cut(model, draw, replicate=False), cut(model, draw, replicate=draw(st.booleans()))


def box_of(model, name, offsets, shape):
    return model[name][tuple(slice(low, low + size) for low, size in zip(offsets, shape, strict=True))]


def published(model, ranks):
    packed = [
        pack(
            [
                LocalShard(name=n, tensor=box_of(model, n, at, shape), global_shape=tuple(model[n].shape), offsets=at)
                for n, at, shape in boxes
            ],
            rank,
        )
        for rank, boxes in enumerate(ranks)
    ]
    blobs = {rank: blob for rank, (_, blob) in enumerate(packed)}
    return build_manifest(PolicyVersion(), [part for part, _ in packed]), blobs


def wanted_by(model, boxes):
    return [
        Wanted(name=n, dtype=str(model[n].dtype)[6:], global_shape=tuple(model[n].shape), offsets=at, shape=shape)
        for n, at, shape in boxes
    ]


def only_what_is_needed(plan, blobs):
    """The blobs with every bit flipped that the plan does not read."""
    left = {rank: ~blobs[rank] for rank in plan.ranks}
    for copy in plan.copies:
        dtype, view = getattr(torch, copy.dtype), (copy.shape, copy.strides, copy.start)
        needed = blobs[copy.rank].view(dtype).as_strided(*view)
        left[copy.rank].view(dtype).as_strided(*view).copy_(needed)
    return left


def assert_each_reader_gets_its_own(model, learner, readers):
    manifest, blobs = published(model, learner)
    for boxes in readers:
        wanted = wanted_by(model, boxes)
        transfer = Transfer(wanted, shared=False)
        transfer.follow(manifest.layout)
        held = [torch.zeros(box.shape, dtype=getattr(torch, box.dtype)) for box in wanted]
        needed = only_what_is_needed(transfer.plan, blobs)
        pairs = zip(transfer.targets(held), transfer.sources(needed), strict=True)
        for target, source in pairs:
            target.copy_(source)
        for tensor, (name, offsets, shape) in zip(held, boxes, strict=True):
            assert torch.equal(tensor, box_of(model, name, offsets, shape))
        num_copied = sum(math.prod(copy.shape) for copy in transfer.plan.copies)
        assert num_copied == sum(math.prod(box.shape) for box in wanted), "no byte is read twice"


@given(two_layouts())
def test_any_layout_goes_over_into_any_other_and_each_reader_reads_only_what_it_needs(layouts):
    model, learner, readers = layouts
    model = {name: tensor for name, tensor in model.items() if tensor.numel()}
    keep = lambda ranks: [[box for box in boxes if box[0] in model] for boxes in ranks]  # noqa: E731
    assert_each_reader_gets_its_own(model, keep(learner), keep(readers))


@given(two_layouts())
def test_and_back(layouts):
    model, learner, readers = layouts
    model = {name: tensor for name, tensor in model.items() if tensor.numel()}
    seen = set()
    once = [[box for box in boxes if box[0] in model and not (box in seen or seen.add(box))] for boxes in readers]
    assert_each_reader_gets_its_own(model, once, [[box for box in boxes if box[0] in model] for boxes in learner])


@given(two_layouts(), st.data())
def test_a_reader_that_holds_another_model_is_refused_before_anything_is_copied(layouts, data):
    model, learner, readers = layouts
    manifest, _ = published(model, learner)
    wanted = wanted_by(model, [box for boxes in readers for box in boxes if math.prod(box[2])])
    if not wanted:
        return
    place = data.draw(st.integers(0, len(wanted) - 1))
    box = wanted[place]
    wrong = data.draw(
        st.sampled_from(
            [
                {"name": "other"},
                {"dtype": "float64"},
                {"global_shape": (*(size + 1 for size in box.global_shape), 1)},
            ]
        )
    )
    fields = {name: getattr(box, name) for name in ("name", "dtype", "global_shape", "offsets", "shape")} | wrong
    wanted[place] = Wanted(**fields)
    with pytest.raises(WeightsError, match=fields["name"]):
        compile_plan(manifest.layout, wanted)
