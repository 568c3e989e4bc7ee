"""What changed between two versions of a rank's blob: the elements whose stored bits differ, and nothing else.

A blob is cut into buckets of elements of one width. A bucket that changed is written in one of three forms:

- sparse: the gaps between changed elements, and by how much each changed;
- dense: by how much every element changed;
- raw: its new bytes.

Bits are taken as integers, so that a step of one unit in the last place is 1, whatever the sign or exponent, and NaN,
-0.0 and infinities are bits like others. Numbers are laid out in planes (all lowest bytes, then all second bytes ...),
each of which zstandard compresses by itself: gaps between elements that change at random with probability p have the
entropy H(p)/p, and its Huffman coder comes within a tenth of that. A stream has a checksum for every bucket.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import zstandard

from forge_async.core.errors import DeltaError
from forge_async.weights.manifest import Part

if TYPE_CHECKING:
    import torch

BUCKET_BYTES = 4 << 20
"""Small enough for a processor's cache, and large enough for zstandard's tables to cost nothing."""
MAGIC = b"fad1"
SPARSE, DENSE, RAW = 1, 2, 3
MOST_SPARSE_SHARE = 0.5
"""Above this share of changed elements their places cost more than they save."""

_HEAD = struct.Struct("<4sIQ")
"""Magic, buckets in the table, bytes of the whole stream."""
_CHECKSUM = struct.Struct("<Q")
"""Of head and table, behind the table."""
_ENTRY = struct.Struct("<IBBHIQQ")
"""The fields of an `_Entry`."""
_LENGTH = struct.Struct("<I")
"""Bytes of a plane."""


class _Entry(NamedTuple):
    """A bucket in a stream's table."""

    number: int
    form: int
    num_gap_planes: int
    num_value_planes: int
    num_changed: int
    num_bytes: int
    """Of its payload."""
    checksum: int
    """Of its payload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one rank's part of a version changes in the version before."""

    stream: torch.Tensor
    """uint8 [bytes]."""
    num_elements: int
    """Elements that were compared, padding included."""
    num_changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A run of a blob's bytes whose elements have one width."""

    start_bytes: int
    num_bytes: int
    width_bytes: int
    """Of an element: 1, 2, 4 or 8."""

    def view(self, blob: np.ndarray) -> np.ndarray:
        """Its elements as unsigned integers."""
        return blob[self.start_bytes : self.start_bytes + self.num_bytes].view(f"<u{self.width_bytes}")


def buckets(part: Part) -> list[Bucket]:
    """The buckets of a part's blob, in order: equal for equal parts, in any process."""
    import torch

    runs: list[tuple[int, int, int]] = []
    widths = {dtype: getattr(torch, dtype).itemsize for dtype in {shard.dtype for shard in part.shards}}
    starts = [*(shard.start_bytes for shard in part.shards), part.blob_bytes]
    for shard, end in zip(part.shards, starts[1:], strict=True):
        width = min(widths[shard.dtype], 8)  # complex128 is two of 8
        if runs and runs[-1][2] == width:
            runs[-1] = (runs[-1][0], end, width)
        else:
            runs.append((shard.start_bytes, end, width))
    return [
        Bucket(start_bytes=at, num_bytes=min(BUCKET_BYTES, end - at), width_bytes=width)
        for start, end, width in runs
        for at in range(start, end, BUCKET_BYTES)
    ]


def encode(part: Part, base: torch.Tensor, new: torch.Tensor, *, most_bytes: int) -> Delta | None:
    """What `new` changes in `base`, uint8 [blob_bytes] each; None when that takes more than `most_bytes`."""
    import torch

    before, after = base.numpy(), new.numpy()
    entries, payloads, total = [], [], _HEAD.size + _CHECKSUM.size
    for number, bucket in enumerate(buckets(part)):
        if (changed := _encoded(number, bucket.view(before), bucket.view(after))) is None:
            continue
        entries.append(changed[0])
        payloads.append(changed[1])
        total += _ENTRY.size + len(changed[1])
        if total > most_bytes:
            return None
    front = _HEAD.pack(MAGIC, len(entries), total) + b"".join(_ENTRY.pack(*each) for each in entries)
    stream = bytearray(b"".join([front, _CHECKSUM.pack(_checksum(front)), *payloads]))
    return Delta(
        stream=torch.frombuffer(stream, dtype=torch.uint8),
        num_elements=sum(each.num_bytes // each.width_bytes for each in buckets(part)),
        num_changed=sum(entry.num_changed for entry in entries),
    )


def apply(part: Part, blob: torch.Tensor, stream: torch.Tensor) -> None:
    """Make a blob of the base version, uint8 [blob_bytes], one of the version that the delta leads to.

    Raises DeltaError, before anything is written, when the stream is not what `encode` made for this part.
    """
    held, received = blob.numpy(), stream.numpy()
    try:
        changes = list(_checked(buckets(part), received))
    except (struct.error, IndexError) as error:
        raise DeltaError(f"a delta of {len(received)} bytes is cut short") from error
    for bucket, entry, payload in changes:
        _apply_bucket(bucket.view(held), entry, payload)


def _apply_bucket(elements: np.ndarray, entry: _Entry, payload: np.ndarray) -> None:
    if entry.form == RAW:
        elements[:] = payload.view(elements.dtype)
        return
    planes = _decompressed(payload, entry.num_gap_planes + entry.num_value_planes)
    gap_planes, value_planes = planes[: entry.num_gap_planes], planes[entry.num_gap_planes :]
    steps = _unfolded(_joined(value_planes, elements.dtype))
    if entry.form == DENSE:
        elements += steps
        return
    gaps = _joined(gap_planes, np.dtype("<u4"))
    elements[np.cumsum(gaps, dtype=np.int64) + np.arange(len(gaps))] += steps


def _checked(expected: Sequence[Bucket], received: np.ndarray) -> Iterator[tuple[Bucket, _Entry, np.ndarray]]:
    """The buckets of a stream with their payloads. Raises DeltaError for one that does not agree with its checksum."""
    magic, num_entries, num_bytes = _HEAD.unpack(received[: _HEAD.size].data)
    at = _HEAD.size + num_entries * _ENTRY.size
    (checksum,) = _CHECKSUM.unpack(received[at : at + _CHECKSUM.size].data)
    if magic != MAGIC or num_bytes != len(received) or _checksum(received[:at]) != checksum:
        raise DeltaError("the table of a delta is damaged")
    entries = [_Entry(*fields) for fields in _ENTRY.iter_unpack(received[_HEAD.size : at].data)]
    at += _CHECKSUM.size
    for entry in entries:
        payload = received[at : at + entry.num_bytes]
        at += entry.num_bytes
        if _checksum(payload) != entry.checksum:
            raise DeltaError(f"bucket {entry.number} of a delta is damaged")
        yield expected[entry.number], entry, payload


def _encoded(number: int, old: np.ndarray, fresh: np.ndarray) -> tuple[_Entry, bytes] | None:
    """A bucket's entry and payload; None when nothing changed in it."""
    places = np.flatnonzero(old != fresh)
    if not len(places):
        return None
    form, gaps, values = SPARSE, [], []
    if len(places) > MOST_SPARSE_SHARE * len(old):
        form, values = DENSE, _planes(_folded(fresh - old))
    else:
        gaps = _planes((np.diff(places, prepend=-1) - 1).astype("<u4"))
        values = _planes(_folded(fresh[places] - old[places]))
    payload = _compressed(gaps + values)
    if len(payload) >= fresh.nbytes:
        form, gaps, values, payload = RAW, [], [], fresh.tobytes()
    return _Entry(number, form, len(gaps), len(values), len(places), len(payload), _checksum(payload)), payload


def _folded(steps: np.ndarray) -> np.ndarray:
    """Differences modulo the width as small numbers: 0, -1, 1, -2 ... become 0, 1, 2, 3 ..."""
    signed = steps.view(f"<i{steps.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)


def _unfolded(numbers: np.ndarray) -> np.ndarray:
    one = numbers.dtype.type(1)
    return (numbers >> one) ^ (~(numbers & one) + one)


def _planes(numbers: np.ndarray) -> list[np.ndarray]:
    """The bytes of unsigned integers, lowest first, without the planes that are zero throughout."""
    num_planes = max(1, -(-int(numbers.max()).bit_length() // 8))
    rows = numbers.view(np.uint8).reshape(len(numbers), numbers.itemsize)
    return [np.ascontiguousarray(rows[:, plane]) for plane in range(num_planes)]


def _joined(planes: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    rows = np.zeros((len(planes[0]), dtype.itemsize), dtype=np.uint8)
    for place, plane in enumerate(planes):
        rows[:, place] = plane
    return rows.view(dtype).reshape(-1)


def _compressed(planes: Sequence[np.ndarray]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1)
    frames = [compressor.compress(plane.data) for plane in planes]
    return b"".join([*(_LENGTH.pack(len(frame)) for frame in frames), *frames])


def _decompressed(payload: np.ndarray, num_planes: int) -> list[np.ndarray]:
    decompressor, at = zstandard.ZstdDecompressor(), num_planes * _LENGTH.size
    planes = []
    for (num_bytes,) in _LENGTH.iter_unpack(payload[:at].data):
        planes.append(np.frombuffer(decompressor.decompress(payload[at : at + num_bytes].data), dtype=np.uint8))
        at += num_bytes
    return planes


def _checksum(data: Any) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(data)
