"""A reader of versions that build on others: what it is given, early or late, and what is compared."""

import asyncio
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import torch

from forge_async.core.errors import FingerprintError
from forge_async.core.versions import PolicyVersion
from forge_async.weights.packing import LocalShard, Packer, Unpacker
from forge_async.weights.plane import WeightPlane
from forge_async.weights.reading import check_served, reading_weights
from tests.fakes import MemoryStore

W, A, B = "q_proj.weight", "q_proj.lora_A.weight", "q_proj.lora_B.weight"
FIRST = PolicyVersion(step=0)


@dataclass
class Holding:
    """An engine that can be read back but for what is sealed, of which `wrong` is not what it should be."""

    weights: dict[str, torch.Tensor]
    sealed: frozenset[str] = frozenset()
    wrong: str = ""

    def read(self, names):
        yield from ((name, self.weights[name]) for name in names if name not in self.sealed)

    def first_wrong(self, names):
        return self.wrong if self.wrong in self.sealed.intersection(names) else ""


async def publish(plane, step, values, base=""):
    shards = [
        LocalShard(name=name, tensor=torch.full((2, 2), float(value)), global_shape=(2, 2), offsets=(0, 0))
        for name, value in values.items()
    ]
    version = PolicyVersion(step=step)
    await plane.stage(version, *Packer(0).pack(shards))
    await plane.commit(version, 1, base)
    return version


async def read(plane, version, base=""):
    async with reading_weights(plane, Unpacker(shared=False), version, base) as (weights, manifests, _):
        return {name: tensor[0, 0].item() for name, tensor in weights.items()}, [each.version for each in manifests]


async def a_run():
    """A whole version, in which adapters are 0, and one of adapters on it."""
    plane = WeightPlane(MemoryStore())
    await publish(plane, 0, {W: 7, A: 1, B: 0})
    return plane, await publish(plane, 1, {A: 2, B: 3}, base=str(FIRST))


async def test_a_reader_that_has_the_base_is_given_the_adapters_alone():
    plane, version = await a_run()
    assert await read(plane, version, base=str(FIRST)) == ({A: 2, B: 3}, [version])


@pytest.mark.parametrize("base", ["", "policy@3.0"])
async def test_a_late_reader_is_given_the_base_below_them(base):
    plane, version = await a_run()
    await plane.retire_all_but(1)
    assert await read(WeightPlane(plane.store), version, base) == ({W: 7, A: 2, B: 3}, [version, FIRST])


class SlowUnpacker(Unpacker):
    """Takes until the test lets it."""

    def __init__(self):
        super().__init__(shared=False)
        self.begun, self.may_end, self.has_ended = threading.Event(), threading.Event(), False

    def unpack(self, manifest, blobs):
        self.begun.set()
        assert self.may_end.wait(10)
        self.has_ended = True
        return super().unpack(manifest, blobs)


@pytest.mark.timeout(20)
async def test_a_reader_that_gives_up_gives_back_what_it_read_when_nobody_reads_it_any_more():
    plane, version = await a_run()
    unpacker, at_return = SlowUnpacker(), []
    reading = plane.reading

    @asynccontextmanager
    async def lending(asked):
        async with reading(asked) as found:
            try:
                yield found
            finally:
                at_return.append(unpacker.has_ended)

    plane.reading = lending

    async def give_up():
        async with reading_weights(plane, unpacker, version, str(FIRST)):
            raise AssertionError("it was called off before")

    task = asyncio.ensure_future(give_up())
    assert await asyncio.to_thread(unpacker.begun.wait, 10)
    task.cancel()
    await asyncio.wait({task}, timeout=0.05)
    unpacker.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert at_return == [True]


@pytest.mark.parametrize("wrong", [W, A, B])
async def test_a_late_reader_is_compared_with_both_the_newer_first(wrong):
    plane, version = await a_run()
    served = {name: torch.full((2, 2), value) for name, value in {W: 7.0, A: 2.0, B: 3.0}.items()}
    manifests = [await plane.manifest(each) for each in (version, FIRST)]

    def check():
        check_served(manifests, Holding(served), "policy_0", "full")

    check()
    served[wrong] = torch.zeros(2, 2)
    with pytest.raises(FingerprintError, match=f"policy_0 pulled policy@0.{int(wrong != W)}, but {wrong}"):
        check()


async def test_what_is_sealed_is_compared_by_what_the_engine_computes_with_it():
    plane, version = await a_run()
    manifests = [await plane.manifest(each) for each in (version, FIRST)]
    served = {name: torch.full((2, 2), value) for name, value in {A: 2.0, B: 3.0}.items()}
    check_served(manifests, Holding(served, sealed=frozenset([W])), "policy_0", "full")
    with pytest.raises(FingerprintError, match=f"policy_0 pulled policy@0.0, but does not compute with {W}"):
        check_served(manifests, Holding(served, sealed=frozenset([W]), wrong=W), "policy_0", "full")
    served[A] = torch.zeros(2, 2)
    with pytest.raises(FingerprintError, match=f"{A} as it is served differs"):
        check_served(manifests, Holding(served, sealed=frozenset([W])), "policy_0", "full")
