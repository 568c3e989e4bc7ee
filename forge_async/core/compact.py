"""Pickling of the records that cross processes.

An array costs pickle some microseconds whatever it holds, and a dataclass with slots runs Python code for each object.
A batch has thousands of both, so a record pickles as one tuple, its small arrays laid end to end in one buffer, and
many records of a kind in one message (`Records`) field by field.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

INLINE_BYTES = 16 << 10
"""Larger arrays travel by themselves: they are not worth another copy."""
ALIGNMENT_BYTES = 8
"""Of each array in the buffer."""

T = TypeVar("T")
_Place = tuple[int, str, tuple[int, ...]]
"""Number of the field, dtype, and shape of an array in the buffer."""


class Compact:
    """Base of dataclasses with slots that travel. Arrays arrive writable, as they were, in memory of their record."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        values: list[Any] = [getattr(self, name) for name in _names(type(self))]
        places: list[_Place] = []
        parts: list[bytes] = []
        for number, value in enumerate(values):
            if type(value) is np.ndarray and value.nbytes <= INLINE_BYTES and not value.dtype.hasobject:
                places.append((number, value.dtype.str, value.shape))
                parts += [value.tobytes(), bytes(_padding(value.nbytes))]
                values[number] = None
        return _made, (type(self), values, places, b"".join(parts))


class Records(list[T]):
    """A list that travels: it arrives as a plain list, and the records of a kind in it cost it little each.

    Every field is a column. Small arrays of one are laid end to end, so that what arrives of them are parts of one
    array: writable, but in memory that lives as long as any record of the message.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        if len(self) < 2 or not _are_alike(self):
            return list, (list(self),)
        return _records, _taken_apart(self)


class _EndToEnd(tuple[np.ndarray, list[int]]):
    """A column of arrays: all of them laid along the first axis, and the length of each."""

    __slots__ = ()


class _Same(tuple[Any, int]):
    """A column of one and the same object, and how often."""

    __slots__ = ()


class _Nested(tuple[type[Compact], int, list[Any]]):
    """A column of records: their kind, their number, and their columns."""

    __slots__ = ()


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether these are records of one kind."""
    return bool(values) and isinstance(values[0], Compact) and len(set(map(type, values))) == 1


# Loops run inside `map` below: a batch has thousands of fields, and a turn of a Python loop costs more than the rest.


def _taken_apart(records: Sequence[Any]) -> tuple[type[Any], int, list[Any]]:
    kind = type(records[0])
    return kind, len(records), [_column(list(map(attrgetter(name), records))) for name in _names(kind)]


def _column(values: list[Any]) -> Any:
    first = values[0]
    if len(set(map(id, values))) == 1:
        return _Same((first, len(values)))
    if _are_alike(values):
        return _Nested(_taken_apart(values))
    if _fit_together(values):
        return _EndToEnd((np.concatenate(values), list(map(len, values))))
    return values


def _fit_together(values: Sequence[Any]) -> bool:
    """Whether these are small arrays that can be laid along their first axis."""
    first = values[0]
    if set(map(type, values)) != {np.ndarray} or not first.ndim or first.dtype.hasobject:
        return False
    if len(set(map(attrgetter("dtype"), values))) > 1 or max(map(attrgetter("nbytes"), values)) > INLINE_BYTES:
        return False
    shapes = set(map(attrgetter("ndim"), values)) if first.ndim == 1 else {value.shape[1:] for value in values}
    return len(shapes) == 1


def _records(kind: type[Any], count: int, columns: list[Any]) -> list[Any]:
    records = [object.__new__(kind) for _ in range(count)]
    for name, column in zip(_names(kind), columns, strict=True):
        # Past the frozen dataclass's own __setattr__, straight into the slot.
        deque(map(getattr(kind, name).__set__, records, _values(column)), maxlen=0)
    return records


def _values(column: Any) -> Sequence[Any]:
    match column:
        case _EndToEnd():
            laid, lengths = column
            ends = list(accumulate(lengths))
            return list(map(laid.__getitem__, map(slice, [0, *ends[:-1]], ends)))
        case _Same():
            value, count = column
            return [value] * count
        case _Nested():
            return _records(*column)
    return column


def _made(kind: type[Any], values: list[Any], places: list[_Place], data: bytes) -> Any:
    buffer, start = bytearray(data), 0
    for number, dtype, shape in places:
        values[number] = array = np.ndarray(shape, dtype, buffer, start)
        start += array.nbytes + _padding(array.nbytes)
    made = object.__new__(kind)
    for name, value in zip(_names(kind), values, strict=True):
        object.__setattr__(made, name, value)  # frozen for everybody else
    return made


def _padding(num_bytes: int) -> int:
    return -num_bytes % ALIGNMENT_BYTES


@functools.cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
