import pickle
from fractions import Fraction

import pytest

from forge_async.core.errors import WeightsError
from forge_async.weights.codec import decode, encode
from forge_async.weights.manifest import Packed, Part, Shard

SHARD = Shard(
    name="w", dtype="float32", global_shape=(2,), offsets=(0,), shape=(2,), rank=0, start_bytes=0, num_bytes=8
)


@pytest.mark.parametrize("value", [Packed(part=Part.of(0, [SHARD], 64), digests=b"x" * 8), ("small", 1), {"a": [1.5]}])
def test_what_the_plane_stores_comes_back(value):
    assert decode(encode(value)) == value


class Evil:
    def __reduce__(self):
        return print, ("owned",)


@pytest.mark.parametrize("value", [Evil(), Fraction(1, 2), print])
def test_bytes_that_name_anything_else_are_refused(value, capsys):
    with pytest.raises(WeightsError, match="cannot be read .it names .*damaged or not ours"):
        decode(pickle.dumps(value))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("data", [b"", b"nonsense", encode(SHARD)[:-5]])
def test_damaged_bytes_are_refused(data):
    with pytest.raises(WeightsError, match="damaged or not ours"):
        decode(data)


def test_functions_of_our_own_modules_cannot_be_named_either():
    data = b"cforge_async.weights.records\nrecord_of\n."
    with pytest.raises(WeightsError, match="it names forge_async.weights.records.record_of"):
        decode(data)
