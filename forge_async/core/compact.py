"""Pickling of the records that cross processes.

An array costs pickle some microseconds whatever it holds, and a dataclass with slots runs Python code for each object.
A batch has thousands of both, so a record pickles as one tuple, its small arrays laid end to end in one buffer.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

INLINE_BYTES = 16 << 10
"""Larger arrays travel by themselves: they are not worth another copy."""
ALIGNMENT_BYTES = 8
"""Of each array in the buffer."""

_Place = tuple[int, str, tuple[int, ...]]
"""Number of the field, dtype, and shape of an array in the buffer."""


class Compact:
    """Base of dataclasses that travel. Their arrays arrive writable, as they were, each in memory of the record."""

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
