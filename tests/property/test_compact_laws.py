"""Records arrive as they left, whatever carries them."""

import copy
import dataclasses
import pickle
import sys

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from forge_async.core.compact import INLINE_BYTES, Compact, Records
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


RECORDS = st.builds(
    Record,
    first=ARRAYS,
    name=st.text(max_size=3),
    second=st.none() | ARRAYS,
    inner=st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 4), st.just(0)), max_size=3).map(VersionRuns.of),
    third=hnp.arrays("float32", st.tuples(st.integers(0, 4), st.just(2))),
)


@given(st.lists(RECORDS, max_size=5), st.booleans())
def test_records_that_travel_together_arrive_as_they_left(records, twice):
    sent = Records(records * 2 if twice else records)
    for arrived in (pickle.loads(pickle.dumps(sent)), pickle.loads(cloudpickle.dumps((sent, 1)))[0]):
        assert type(arrived) is list
        assert len(arrived) == len(sent) and all(map(same, sent, arrived))


def test_what_travels_together_arrives_writable_and_apart():
    groups = [make_group(i, PromptId(source="s", epoch=0, index=i), [[1, 2], [3]], prompt_tokens=2) for i in range(3)]
    arrived = pickle.loads(pickle.dumps(Records(groups)))
    arrived[0].samples.logprobs[...] = 7
    assert same(groups[1], arrived[1]) and same(groups[2], arrived[2])
    assert not (groups[0].samples.logprobs == 7).any()


@pytest.mark.parametrize("others", [[1], ["", None], [PromptId(source="s", epoch=0, index=1)]])
def test_a_list_of_other_things_travels_as_a_list(others):
    sent = Records([VersionRuns.of([(1, 2, 0)]), *others])
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is list and all(map(same, sent, arrived))


def test_large_arrays_are_not_copied_once_more_to_lie_end_to_end():
    large = [
        dataclasses.replace(VersionRuns.of([]), lengths=np.arange(INLINE_BYTES, dtype=np.int32) + i) for i in (0, 1)
    ]
    arrived = pickle.loads(pickle.dumps(Records(large)))
    assert all(map(same, large, arrived))
    assert arrived[0].lengths.base is not arrived[1].lengths.base or arrived[0].lengths.base is None


def test_many_records_take_fewer_bytes_together_than_one_by_one():
    groups = [make_group(i, PromptId(source="s", epoch=0, index=i), [[1, 2], [3]], prompt_tokens=2) for i in range(40)]
    assert len(pickle.dumps(Records(groups))) < 0.6 * len(pickle.dumps(groups))


def test_every_kind_of_record_has_slots():
    """`Records` writes straight into them."""
    kinds = [Compact]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # `slots=True` makes a second class of each and leaves the first one behind, without a name.
    named = [kind for kind in kinds[1:] if getattr(sys.modules[kind.__module__], kind.__name__, None) is kind]
    assert {Group, VersionRuns, Record} <= set(named)
    for kind in named:
        assert all(hasattr(getattr(kind, field.name), "__set__") for field in dataclasses.fields(kind)), kind


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
