import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from forge_async.weights.segments import PAGE_BYTES, Segment, SegmentPool


class Memory:
    """Makes segments of nothing, and remembers which are alive."""

    def __init__(self):
        self.made, self.alive, self.dead, self.now_s = 0, {}, set(), 0.0

    def pool(self):
        return SegmentPool(self.create, self.destroy, lambda process: process not in self.dead, lambda: self.now_s)

    def create(self, num_bytes):
        self.made += 1
        self.alive[self.made] = num_bytes
        return Segment(id=self.made, num_bytes=num_bytes, address=f"/{self.made}")

    def destroy(self, segment):
        del self.alive[segment.id]


def fill(pool, key, num_bytes=PAGE_BYTES):
    segment = pool.reserve(num_bytes, "writer")
    pool.bind(segment.id, key)
    return segment.id


def test_versions_that_follow_each_other_use_the_same_memory_again():
    memory = Memory()
    pool = memory.pool()
    for step in range(50):
        fill(pool, f"v{step}")
        pool.unbind(f"v{step - 2}")
    assert memory.made == 3
    assert pool.num_bytes == 3 * PAGE_BYTES


def test_a_leased_segment_is_not_used_again_before_its_release():
    memory = Memory()
    pool = memory.pool()
    first = fill(pool, "v0")
    leased = pool.lease("v0", "reader")
    assert leased.id == first
    pool.unbind("v0")
    assert fill(pool, "v1") != first
    pool.release(first, "reader")
    assert fill(pool, "v2") == first


def test_two_leases_need_two_releases_and_strangers_release_nothing():
    pool = Memory().pool()
    first = fill(pool, "v0")
    pool.lease("v0", "reader")
    pool.lease("v0", "reader")
    pool.unbind("v0")
    pool.release(first, "reader")
    pool.release(first, "stranger")
    assert fill(pool, "v1") != first
    pool.release(first, "reader")
    pool.release(first, "reader")
    assert fill(pool, "v2") == first


def test_what_the_dead_had_reserved_or_leased_comes_back():
    memory = Memory()
    pool = memory.pool()
    fill(pool, "kept")
    half_written = pool.reserve(PAGE_BYTES, "learner")
    memory.dead.add("learner")
    assert pool.reserve(PAGE_BYTES, "learner again").id == half_written.id
    pool.lease("kept", "policy")
    pool.unbind("kept")
    memory.dead.add("policy")
    pool.sweep()
    assert len(memory.alive) == 2


def test_what_is_held_for_longer_than_was_said_is_taken_back_and_its_memory_destroyed():
    memory = Memory()
    pool = memory.pool()
    written = pool.reserve(PAGE_BYTES, "far writer", 10.0)
    fill(pool, "v0")
    read = pool.lease("v0", "far reader", 10.0)
    pool.unbind("v0")
    fill(pool, "kept")
    memory.now_s = 9.9
    assert pool.reserve(PAGE_BYTES, "writer").id not in (written.id, read.id)
    memory.now_s = 10.0
    assert pool.reserve(PAGE_BYTES, "writer").id not in (written.id, read.id)
    assert not {written.id, read.id} & set(memory.alive), "whoever wakes late must not find another's bytes"
    with pytest.raises(KeyError):
        pool.bind(written.id, "late")
    pool.release(read.id, "far reader")


def test_a_late_readers_lease_costs_neither_the_key_nor_other_readers_their_memory():
    memory = Memory()
    pool = memory.pool()
    first = fill(pool, "v0")
    pool.lease("v0", "far reader", 1.0)
    pool.lease("v0", "reader")
    memory.now_s = 1.0
    pool.sweep()
    assert pool.lease("v0", "reader").id == first
    pool.unbind("v0")
    fill(pool, "v1")
    pool.release(first, "reader")
    pool.release(first, "reader")
    assert first not in memory.alive


def test_the_memory_of_the_dead_is_used_again_though_their_time_is_over_too():
    memory = Memory()
    pool = memory.pool()
    fill(pool, "kept")
    half_written = pool.reserve(PAGE_BYTES, "learner", 1.0)
    memory.dead.add("learner")
    memory.now_s = 2.0
    assert pool.reserve(PAGE_BYTES, "another").id == half_written.id


def test_memory_that_is_much_too_large_is_left_for_others_and_given_back_with_time():
    memory = Memory()
    pool = memory.pool()
    fill(pool, "large", 100 * PAGE_BYTES)
    fill(pool, "other", 100 * PAGE_BYTES)
    pool.unbind("large")
    small = fill(pool, "small", PAGE_BYTES)
    assert memory.alive[small] == PAGE_BYTES
    pool.unbind("other")
    assert list(memory.alive) == [small]


def test_closing_gives_everything_back():
    memory = Memory()
    pool = memory.pool()
    fill(pool, "v0")
    pool.lease("v0", "reader")
    pool.close()
    assert memory.alive == {}
    assert pool.live == frozenset()


class PoolLaws(RuleBasedStateMachine):
    """Whatever happens in whatever order: no segment has two users, and no user's segment is destroyed or lent anew."""

    def __init__(self):
        super().__init__()
        self.memory = Memory()
        self.pool = self.memory.pool()
        self.reserved, self.keys, self.leases, self.numbers = {}, {}, [], 0

    def used(self):
        return {*self.reserved, *self.keys.values(), *(segment for segment, _ in self.leases)}

    def check(self):
        assert self.used() <= set(self.memory.alive)
        assert self.pool.live == set(self.memory.alive)
        free = sum(size for number, size in self.memory.alive.items() if number not in self.used())
        assert free <= sum(self.memory.alive[number] for number in self.used())

    @rule(pages=st.integers(1, 5), writer=st.sampled_from("ab"))
    def reserve(self, pages, writer):
        used = self.used()
        segment = self.pool.reserve(pages * PAGE_BYTES, writer)
        assert segment.id not in used
        assert segment.num_bytes >= pages * PAGE_BYTES
        self.reserved[segment.id] = writer
        self.check()

    @rule(data=st.data())
    def bind(self, data):
        if self.reserved:
            segment = data.draw(st.sampled_from(sorted(self.reserved)))
            del self.reserved[segment]
            self.numbers += 1
            self.keys[f"k{self.numbers}"] = segment
            self.pool.bind(segment, f"k{self.numbers}")
            self.check()

    @rule(data=st.data(), reader=st.sampled_from("abc"))
    def lease(self, data, reader):
        if self.keys:
            key = data.draw(st.sampled_from(sorted(self.keys)))
            assert self.pool.lease(key, reader).id == self.keys[key]
            self.leases.append((self.keys[key], reader))
            self.check()

    @rule(data=st.data())
    def release(self, data):
        if self.leases:
            segment, reader = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.pool.release(segment, reader)
            self.check()

    @rule(data=st.data())
    def delete(self, data):
        if self.keys:
            key = data.draw(st.sampled_from(sorted(self.keys)))
            del self.keys[key]
            self.pool.unbind(key)
            self.check()

    @rule(pages=st.integers(1, 5))
    def overstay(self, pages):
        late = self.pool.reserve(pages * PAGE_BYTES, "far", 1.0)
        assert late.id not in self.used()
        self.memory.now_s += 1.0
        self.pool.sweep()
        assert late.id not in self.memory.alive
        self.check()

    @rule(process=st.sampled_from("abc"))
    def die_and_come_again(self, process):
        self.memory.dead = {process}
        self.reserved = {segment: writer for segment, writer in self.reserved.items() if writer != process}
        self.leases = [(segment, reader) for segment, reader in self.leases if reader != process]
        self.pool.sweep()
        self.memory.dead = set()
        self.check()


PoolLaws.TestCase.settings = settings(max_examples=50, stateful_step_count=40)
TestPoolLaws = PoolLaws.TestCase


@given(st.integers(1, 10 * PAGE_BYTES))
def test_a_segment_is_whole_pages(num_bytes):
    segment = Memory().pool().reserve(num_bytes, "writer")
    assert segment.num_bytes % PAGE_BYTES == 0
    assert 0 <= segment.num_bytes - num_bytes < PAGE_BYTES
