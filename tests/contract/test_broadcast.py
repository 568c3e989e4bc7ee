"""Broadcast between processes: what arrives, who is left out, and what a stopped or dead reader costs the others."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest
import torch

from tests.child import Child
from tests.fakes import MemoryStore

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]
MIB = 1 << 20
MEMBER_S = 5.0
"""Of a member that is stopped. Those that live have to answer within it on a busy machine."""


def blob(num_bytes, seed):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Run:
    """A meeting point, the store below, one writer, and what it was told of its broadcasts."""

    def __init__(self):
        from forge_async.backends.broadcast_ends import Limits
        from forge_async.backends.broadcast_group import MeetingPoint

        self.point, self.base, self.sendings = MeetingPoint("127.0.0.1"), MemoryStore(), []
        self.limits = Limits(member_s=MEMBER_S, total_s=60.0)
        self.clients = []
        self.writer = self.client(on_sent=self.sendings.append)

    def client(self, **options):
        from forge_async.backends.broadcast_store import BroadcastStore

        self.clients.append(
            BroadcastStore(self.base, self.point.meeting, backend="gloo", limits=self.limits, **options)
        )
        return self.clients[-1]

    async def put(self, key, num_bytes, seed):
        """Put a value, and wait until its broadcast has ended; returns what became of it, None without one."""
        before = len(self.sendings)
        await self.writer.put({key: blob(num_bytes, seed)})
        await self.writer.settled()
        return self.sendings[-1] if len(self.sendings) > before else None

    async def close(self):
        from forge_async.backends.broadcast_ends import dismiss

        for client in self.clients:
            await client.close()
        dismiss(self.point.meeting)
        self.point.close()


@pytest.fixture
async def run():
    made = Run()
    yield made
    await made.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A process that will be stopped and killed, its imports done."""
    child = Child(tmp_path_factory.mktemp("reader") / "log")
    child.build("tests.backends:broadcast_member", None, 0, 0.0)
    yield child
    child.close()


async def read(client, key, num_bytes, seed):
    """Read a value and compare it; returns how long that took, and whether it was pulled from the store below."""
    begun, pulled = time.monotonic(), len(pulls(client))
    async with client.reading([key]) as [value]:
        assert torch.equal(value, blob(num_bytes, seed))
    assert client.carried_by == ("memory" if len(pulls(client)) > pulled else "broadcast")
    return time.monotonic() - begun, len(pulls(client)) > pulled


def pulls(client):
    return [key for name, key in client._base.operations if name == "get" and key.endswith(".whole")]


async def test_the_first_value_is_pulled_and_the_next_ones_arrive_by_themselves(run):
    readers = [run.client() for _ in range(2)]
    assert await run.put("v1", MIB, 1) is None
    assert [(await read(each, "v1", MIB, 1))[1] for each in readers] == [True, True]
    for seed, num_bytes in ((2, MIB), (3, 20 * MIB + 5)):
        sending = await run.put(f"v{seed}", num_bytes, seed)
        assert (sending.key, sending.num_members, sending.error) == (f"v{seed}", 2, "")
        assert [(await read(each, f"v{seed}", num_bytes, seed))[1] for each in readers] == [False, False]
    assert [(await read(each, "v1", MIB, 1))[1] for each in readers] == [True, True], "an old one is read where it lies"
    late = run.client()
    assert (await read(late, "v3", 20 * MIB + 5, 3))[1]
    assert (await run.put("v4", MIB, 4)).num_members == 3
    assert not (await read(late, "v4", MIB, 4))[1]


async def test_a_manifest_is_stored_after_what_it_names(run):
    await run.writer.put({"v1/shard/0": blob(MIB, 1), "v1/part/0": ("part",), "v1/manifest": ("manifest",)})
    puts = [key for name, key in run.base.operations if name == "put"]
    assert puts == ["v1/shard/0.whole", "v1/shard/0", "v1/part/0", "v1/manifest"]
    assert sorted(await run.writer.keys()) == ["v1/manifest", "v1/part/0", "v1/shard/0"]
    await run.writer.delete("v1/")
    assert run.base.data == {}


async def test_each_learner_rank_sends_its_own_part(run):
    reader, second = run.client(), run.client()
    for seed in (1, 2):
        await asyncio.gather(
            run.writer.put({f"v{seed}/0": blob(MIB, seed)}), second.put({f"v{seed}/1": blob(MIB, -seed)})
        )
        async with reader.reading([f"v{seed}/0", f"v{seed}/1"]) as values:
            assert torch.equal(values[0], blob(MIB, seed))
            assert torch.equal(values[1], blob(MIB, -seed))
    assert len(pulls(reader)) == 2, "only those of the first version"


async def test_a_reader_killed_in_the_middle_holds_nobody_up_and_its_successor_pulls(run, other):
    reader = run.client()
    await run.put("v1", MIB, 1)
    await read(reader, "v1", MIB, 1)
    sender = run.writer._sender.id
    doomed = other.build("tests.backends:broadcast_member", run.point.meeting, sender, MEMBER_S)
    assert (await run.put("v2", MIB, 2)).num_members == 2
    assert doomed.take(2) == blob(MIB, 2).tolist()[:8]

    other.signal(signal.SIGSTOP)
    begun = time.monotonic()
    await run.writer.put({"v3": blob(64 * MIB, 3)})
    assert time.monotonic() - begun < MEMBER_S, "the learner goes on"
    waiting = asyncio.ensure_future(read(reader, "v3", 64 * MIB, 3))
    async with asyncio.timeout(MEMBER_S):
        while reader._members[sender]._inbox._moved_s < begun:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not waiting.done(), "the stopped one is in the middle of it, and so is everybody"
    other.signal(signal.SIGKILL)
    took_s, pulled = await waiting
    assert pulled
    assert took_s < 2 * MEMBER_S
    await run.writer.settled()
    assert run.sendings[-1].error
    assert run.sendings[-1].failure == f"The broadcast of v3 broke off: {run.sendings[-1].error}"

    sending = await run.put("v4", 64 * MIB, 4)
    assert (sending.num_members, sending.error, sending.failure) == (1, "", "")
    assert not (await read(reader, "v4", 64 * MIB, 4))[1], "the one that lives has a new group"
    successor = run.client()
    assert (await read(successor, "v4", 64 * MIB, 4))[1]
    assert (await run.put("v5", MIB, 5)).num_members == 2


async def test_a_reader_that_does_not_answer_is_left_out_and_joins_again_when_it_does(run, tmp_path):
    other = Child(tmp_path / "log")
    try:
        reader = run.client()
        await run.put("v1", MIB, 1)
        await read(reader, "v1", MIB, 1)
        slow = other.build("tests.backends:broadcast_member", run.point.meeting, run.writer._sender.id, MEMBER_S)
        other.signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert (await run.put("v2", MIB, 2)).num_members == 1
        assert time.monotonic() - begun < 3 * MEMBER_S
        assert not (await read(reader, "v2", MIB, 2))[1]
        other.signal(signal.SIGCONT)
        assert slow.take(2) is None
        assert (await run.put("v3", MIB, 3)).num_members == 2
        assert slow.take(3) == blob(MIB, 3).tolist()[:8]
    finally:
        other.close()


async def test_a_meeting_point_that_ends_leaves_versions_to_be_pulled(run):
    reader = run.client()
    await run.put("v1", MIB, 1)
    await read(reader, "v1", MIB, 1)
    assert (await run.put("v2", MIB, 2)).num_members == 1
    await read(reader, "v2", MIB, 2)
    run.point.close()
    assert await run.put("v3", MIB, 3) is None
    assert (await read(reader, "v3", MIB, 3))[1]


async def test_an_address_that_is_not_this_hosts_is_told_by_its_key():
    from forge_async.backends.broadcast_group import MeetingPoint
    from forge_async.core.errors import WeightsError

    with pytest.raises(WeightsError, match=r"weights\.broadcast_host=192\.0\.2\.1 cannot be listened on"):
        MeetingPoint("192.0.2.1")
