"""Records arrive as they left, whatever carries them."""

import copy
import dataclasses
import pickle

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forge_async.core.compact import INLINE_BYTES, Compact
from forge_async.core.records import Group, PromptId
from forge_async.core.versions import VersionRuns
from tests.strategies import make_group

DTYPES = st.sampled_from(["bool", "int8", "uint8", "int16", "int32", "int64", "float32", "float64"])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record(Compact):
    first: np.ndarray
    name: str
    second: np.ndarray | None
    inner: VersionRuns
    third: np.ndarray


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


@given(ARRAYS, st.none() | ARRAYS, ARRAYS, st.text())
def test_records_arrive_as_they_left(first, second, third, name):
    record = Record(first=first, name=name, second=second, inner=VersionRuns.of([(3, 1, 0), (2, 4, 1)]), third=third)
    for arrived in (
        pickle.loads(pickle.dumps(record)),
        pickle.loads(cloudpickle.dumps([record, record]))[1],
        copy.deepcopy(record),
    ):
        assert same(record, arrived)
        arrived.first[...] = 0  # writable, and nobody else's memory
        assert same(third, arrived.third) and (second is None or same(second, arrived.second))


@pytest.mark.parametrize("extra", [0, 1])
def test_large_and_strided_arrays_arrive_too(extra):
    large = np.arange(INLINE_BYTES + extra, dtype=np.uint8)
    record = Record(first=large, name="", second=large[::3], inner=VersionRuns.of([]), third=np.ones((4, 5)).T[1:])
    assert same(record, pickle.loads(pickle.dumps(record)))


def test_a_group_takes_fewer_bytes_than_its_parts_pickled_one_by_one():
    group = make_group(7, PromptId(source="s", epoch=0, index=7), [[1, 1, 2], [3]], prompt_tokens=2)
    arrived: Group = pickle.loads(pickle.dumps(group))
    assert same(group, arrived) and arrived.oldest_step() == 1
    parts = [getattr(group.samples, name) for name in ("lengths", "token_ids", "loss_mask", "logprobs", "advantages")]
    assert len(pickle.dumps(group)) < sum(len(pickle.dumps(part)) for part in parts) + 500


def test_what_is_a_key_stays_one():
    one = PromptId(source="s", epoch=0, index=7)
    assert pickle.loads(pickle.dumps({one: 1}))[one] == 1
