"""A delta gives back every bit: whatever the dtype, the sharding, and how much of it changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge_async.core.errors import DeltaError
from forge_async.weights import delta
from forge_async.weights.packing import LocalShard, Packer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn)
SPECIAL = {  # NaNs of several payloads, -0.0, infinities, subnormals
    2: (0x7FC0, 0xFFC1, 0x7F81, 0x8000, 0x0000, 0x7F80, 0xFF80, 0x0001, 0x7C00, 0xFFFF),
    4: (0x7FC00000, 0xFFC00001, 0x7F800001, 0x80000000, 0x00000000, 0x7F800000, 0xFF800000, 0x00000001),
}
shares = st.sampled_from((0.0, 0.001, 0.02, 0.3, 0.6, 1.0))


def bits(shape, dtype, seed):
    """A tensor of random stored bits, with the odd special value among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    tensor = raw.reshape(-1).view(dtype).reshape(shape)
    if dtype.itemsize in SPECIAL and tensor.numel():
        flat = tensor.view(torch.int16 if dtype.itemsize == 2 else torch.int32).reshape(-1)
        for place in range(0, flat.numel(), 7):
            value, width = SPECIAL[dtype.itemsize][place % 8], 8 * dtype.itemsize
            flat[place] = value - (1 << width) if value >> (width - 1) else value
    return tensor


def changed(tensor, share, small, seed):
    """The tensor with a share of its elements changed: by one unit in the last place, or to anything."""
    generator = torch.Generator().manual_seed(seed)
    other = bits(tuple(tensor.shape), tensor.dtype, seed + 1)
    if small and tensor.dtype in (torch.float32, torch.bfloat16, torch.float16):
        ints = torch.int16 if tensor.dtype.itemsize == 2 else torch.int32
        step = torch.randint(0, 2, tensor.shape, generator=generator).to(ints) * 2 - 1
        other = (tensor.view(ints) + step).view(tensor.dtype)
    chosen = torch.rand(tensor.shape, generator=generator) < share
    return torch.where(chosen, other, tensor) if tensor.dtype != torch.float8_e4m3fn else (
        torch.where(chosen, other.view(torch.uint8), tensor.view(torch.uint8)).view(tensor.dtype)
    )  # fmt: skip


@st.composite
def pairs_of_blobs(draw):
    """(part, blob of the base, blob of what came after it) of one rank of a sharded model, empty boxes among them."""
    shapes = draw(
        st.lists(
            st.tuples(
                st.one_of(st.just(()), st.tuples(st.integers(0, 9), st.integers(1, 40)), st.tuples(st.just(5000))),
                st.sampled_from(DTYPES),
            ),
            max_size=6,
        )
    )
    seed, share, small = draw(st.integers(0, 999)), draw(shares), draw(st.booleans())
    before = [bits(shape, dtype, seed + i) for i, (shape, dtype) in enumerate(shapes)]
    after = [changed(tensor, share, small, seed + 50 * i) for i, tensor in enumerate(before)]
    packer = Packer(draw(st.integers(0, 2)))
    (part, base), (_, new) = (packer.pack(map(box, range(len(each)), each)) for each in (before, after))
    return part, base, new


def box(number, tensor):
    shape = tuple(tensor.shape)
    return LocalShard(name=f"p{number}", tensor=tensor, global_shape=shape, offsets=(0,) * len(shape))


@given(pairs_of_blobs())
def test_base_and_delta_give_the_new_bits_and_only_what_changed_is_counted(pair):
    part, base, new = pair
    found = delta.encode(part, base, new, most_bytes=1 << 30)
    assert found is not None
    assert (found.num_changed == 0) == torch.equal(base, new)
    assert found.num_changed <= min(found.num_elements, int((base != new).sum()))
    rebuilt = base.clone()
    delta.apply(part, rebuilt, found.stream)
    assert torch.equal(rebuilt, new)


@given(pairs_of_blobs(), st.data())
def test_a_damaged_stream_is_refused_before_a_byte_is_written(pair, data):
    part, base, new = pair
    found = delta.encode(part, base, new, most_bytes=1 << 30)
    assert found is not None
    stream, held = found.stream.clone(), base.clone()
    if data.draw(st.booleans()):
        stream[data.draw(st.integers(0, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        stream = stream[: data.draw(st.integers(0, len(stream) - 1))]
    with pytest.raises(DeltaError):
        delta.apply(part, held, stream)
    assert torch.equal(held, base)


@given(pairs_of_blobs())
def test_it_is_given_up_when_it_would_be_larger_than_allowed(pair):
    part, base, new = pair
    found = delta.encode(part, base, new, most_bytes=1 << 30)
    assert found is not None
    size = len(found.stream)
    if found.num_changed:
        assert delta.encode(part, base, new, most_bytes=size) is not None
        assert delta.encode(part, base, new, most_bytes=size - 1) is None
    assert size <= part.blob_bytes + 24 + 32 * len(delta.buckets(part)), (
        "never more than the bytes themselves and a table"
    )
