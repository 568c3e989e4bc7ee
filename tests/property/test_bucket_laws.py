"""Buckets cover a blob exactly, and two of them are under way at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge_async.weights.buckets import IN_FLIGHT, buckets, carry


@given(num_bytes=st.integers(0, 10_000), bucket_bytes=st.integers(1, 3_000))
def test_buckets_tile_a_blob_in_order_and_only_the_last_is_short(num_bytes, bucket_bytes):
    cut = list(buckets(num_bytes, bucket_bytes))
    assert [byte for bucket in cut for byte in range(bucket.start, bucket.stop)] == list(range(num_bytes))
    assert all(bucket.stop - bucket.start == bucket_bytes for bucket in cut[:-1])
    assert all(0 < bucket.stop - bucket.start <= bucket_bytes for bucket in cut)


@given(num_bytes=st.integers(0, 2_000), bucket_bytes=st.integers(1, 300), fails_at=st.none() | st.integers(0, 10))
def test_two_buckets_are_under_way_while_there_are_two_and_none_is_left_or_waited_for_twice(
    num_bytes, bucket_bytes, fails_at
):
    under_way: list[slice] = []
    arrived: list[slice] = []
    most = 0

    def start(bucket):
        nonlocal most
        if len(arrived) == fails_at:
            raise RuntimeError("a member died")
        under_way.append(bucket)
        most = max(most, len(under_way))

        def wait():
            assert under_way.pop(0) == bucket
            arrived.append(bucket)

        return wait

    cut = list(buckets(num_bytes, bucket_bytes))
    try:
        carry(cut, start)
    except RuntimeError:
        assert len(arrived) == fails_at
        return
    assert arrived == cut
    assert not under_way
    assert most == min(IN_FLIGHT, len(cut))
