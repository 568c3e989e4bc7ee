"""`bench weights`: a model from one process to another on this host, a new version each time, in every way there is.

`memcpy_warm` is the limit: each end copies the model once, into memory that it has used before. A row's
`publish_of_memcpy` and `pull_of_memcpy` are its rates over that one's, measured in turn with it.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from forge_async.actors.forge_actor import ActorHandle, ForgeActor
from forge_async.actors.store_actor import StoreActor
from forge_async.apps.bench.deltas import coding_rows
from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan
from forge_async.apps.bench.weight_ends import End, Timing
from forge_async.core.errors import ConfigError
from forge_async.runtime.meshes import Placement, close_monarch
from forge_async.weights.settings import WeightsSettings

SMALL_TENSORS, SMALL_BYTES = 20_000, 4096
"""The model of many small tensors, and the size of each."""
PER_TENSOR = ("torchstore_stock", "gloo_per_parameter")
"""Cases that take 1 to 10 ms a tensor."""
MOST_TENSORS = 100
"""They are given no more than these."""
SLOW = (*PER_TENSOR, "rpc", "rdma", "http", "filesystem", "safetensors_disk")
"""Cases of which one round to warm up and two that count are enough."""
WARM_UP_ROUNDS = 4
"""So many versions are in memory at most: one that is written, two that are kept, one that is read."""
MEMORY_SHARE = 0.5
"""Of the free memory, that the versions of the cases that take turns may take."""
REFERENCE = "memcpy_warm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is moved."""

    num_tensors: int
    num_bytes: int
    """Of all of them."""

    @property
    def suffix(self) -> str:
        """What the names of its cases end with."""
        return f"/{self.num_tensors}x{self.num_bytes // self.num_tensors}"


def measure(plan: Plan) -> Report:
    """Move each model in each way, in turn; then code what little of one changes."""
    report = asyncio.run(_measure(plan))
    return replace(report, rows=[*report.rows, *coding_rows(plan)])


def workloads(num_bytes: float, tensors: Sequence[int]) -> list[Workload]:
    """The models asked for; without a word, one of 300 tensors and one of many small ones."""
    if num_bytes and num_bytes < 4 * max([300, *tensors]):
        raise ConfigError(f"--bytes {num_bytes:g} leaves less than 4 bytes to a tensor; give more.")
    if tensors:
        return [Workload(num_tensors=each, num_bytes=int(num_bytes or 1e8)) for each in tensors]
    small = Workload(num_tensors=SMALL_TENSORS, num_bytes=SMALL_TENSORS * SMALL_BYTES)
    return [Workload(num_tensors=300, num_bytes=int(num_bytes or 1e8)), *([] if num_bytes else [small])]


async def _measure(plan: Plan) -> Report:
    placement = await Placement.start(plan.config.job, plan.folder)
    memory = Path(tempfile.mkdtemp(prefix="forge_async-bench-", dir="/dev/shm"))
    placement.guardian.add_path(memory)
    rows: list[Mapping[str, Any]] = []
    try:
        ends = await Ends.start(placement, plan.folder, memory)
        for workload in workloads(plan.num_bytes, plan.tensors):
            print(f"{workload.num_tensors} tensors, {workload.num_bytes / 1e6:g} MB", flush=True)
            await ends.load(workload)
            rows += await ends.measure(plan.rounds)
    finally:
        await placement.stop()
        shutil.rmtree(memory, ignore_errors=True)
        await close_monarch()
    return Report(bench="weights", rows=rows, notes=NOTES)


class Ends:
    """A writer and a reader of one model, and the stores between them."""

    def __init__(self, writer: ActorHandle, reader: ActorHandle, ways: Sequence[tuple[str, Any, Any]]) -> None:
        """`ways`: (case, the writer's argument, the reader's) of every way there is."""
        self._writer, self._reader, self._ways = writer, reader, ways
        self._workload = Workload(num_tensors=1, num_bytes=4)
        self._timings: dict[str, list[tuple[Timing, Timing]]] = {}
        self._tensors: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._value = 0
        """What every element of the writer's model is."""

    @classmethod
    async def start(cls, placement: Placement, folder: Path, memory: Path) -> Ends:
        """Start the two processes and the stores. `memory` is a folder in shared memory."""

        async def start(kind: type[ForgeActor], *args: Any) -> ActorHandle:
            return await kind.options(mesh_name=kind.__name__.lower(), hosts=placement.controller).as_actor(*args)

        writer, reader, host = [await start(End, str(folder)) for _ in range(3)]
        stock, ways = await host.stock.call_one(), [(REFERENCE, None, None)]
        for case, settings in PLANES.items():
            handle = await (await start(StoreActor, settings, str(folder / "weights"))).handle.call_one()
            ways.append((case, handle, handle))
        ways += [(case, 0, 1) for case in ("gloo_buckets", "gloo_per_parameter")]
        ways += [(f"safetensors_{where}", str(path), str(path)) for where, path in (("shm", memory), ("disk", folder))]
        return cls(writer, reader, [*ways, ("memcpy_fresh", None, None), ("torchstore_stock", stock, stock)])

    async def load(self, workload: Workload) -> None:
        """Have both ends make the model."""
        self._workload, self._value = workload, 0
        await _both(*(end.load.call_one(workload.num_tensors, workload.num_bytes) for end in self._pair))

    async def measure(self, rounds: int) -> list[Mapping[str, Any]]:
        """Move a new version in each case. Cases take turns, round after round, as many as memory has room for at once;
        with each lot of them the limit is measured anew, and what they kept is let go of."""
        rows: list[dict[str, Any]] = []
        for lot in lots([case for case, *_ in self._ways[1:]], self._workload.num_bytes, free_bytes()):
            limit, *own = await self._take_turns([REFERENCE, *lot], rounds)
            rows += [_over(row, limit) for row in (own if rows else [limit, *own])]
        best = {figure: max(row[figure] for row in rows if row["case"].startswith(OURS)) for figure in RATES}
        return [_with_best(row, best) for row in rows]

    async def _take_turns(self, cases: Sequence[str], rounds: int) -> list[dict[str, Any]]:
        """A row for each case; the first rounds warm up and do not count."""
        self._timings = {case: [] for case in cases}
        for case in cases:
            await self._join(case)
        for number in range(WARM_UP_ROUNDS + rounds):
            for case, timings in self._timings.items():
                is_slow = case.partition("/")[0] in SLOW
                if is_slow and not 0 < number <= 3:
                    continue
                timing = await self._move(case, number)
                if number >= (2 if is_slow else WARM_UP_ROUNDS):
                    timings.append(timing)
        for case in cases:
            for end in self._pair:
                await end.leave.call_one(case, self._versions[case])
        return [self._row(case) for case in cases]

    async def _join(self, case: str) -> None:
        """Have both ends get ready for a way of moving the model."""
        arguments = next(each for name, *each in self._ways if name == case)
        most = MOST_TENSORS if case in PER_TENSOR else self._workload.num_tensors
        self._tensors[case] = min(most, self._workload.num_tensors)
        joining = zip(self._pair, arguments, strict=True)
        await _both(*(end.join.call_one(case, each, self._tensors[case]) for end, each in joining))

    @property
    def _pair(self) -> tuple[ActorHandle, ActorHandle]:
        return self._writer, self._reader

    async def _move(self, case: str, number: int) -> tuple[Timing, Timing]:
        self._versions[case] = version = self._versions.get(case, 0) + 1
        writing = lambda: self._writer.publish.call_one(case, version)  # noqa: E731
        reading = lambda value: self._reader.pull.call_one(case, version, self._tensors[case], value)  # noqa: E731
        if case.startswith("gloo"):
            self._value += 1
            return await _both(writing(), reading(self._value))
        written = await writing()
        self._value = written.value
        return written, await reading(written.value)

    def _row(self, case: str) -> dict[str, Any]:
        """Medians of a case."""
        timings, share = self._timings[case], self._tensors[case] / self._workload.num_tensors
        num_bytes = int(self._workload.num_bytes * share)

        def middle(of: Callable[[tuple[Timing, Timing]], float]) -> float:
            return median(map(of, timings))

        publish_s, pull_s = middle(lambda pair: pair[0].wall_s), middle(lambda pair: pair[1].wall_s)
        return {
            "case": case + self._workload.suffix,
            "publish_gb_per_s": num_bytes / publish_s / 1e9,
            "pull_gb_per_s": num_bytes / pull_s / 1e9,
            "pause_s": middle(lambda pair: pair[1].pause_s),
            "bytes": num_bytes,
            "tensors": self._tensors[case],
            "publish_us_per_tensor": 1e6 * publish_s / self._tensors[case],
            "pull_us_per_tensor": 1e6 * pull_s / self._tensors[case],
            "publish_cpu_s": middle(lambda pair: pair[0].cpu_s),
            "pull_cpu_s": middle(lambda pair: pair[1].cpu_s),
            "rounds": len(timings),
        }


PLANES = {
    "auto": WeightsSettings(transport="auto", verify="none"),
    "shm": WeightsSettings(transport="shm", verify="none"),
    "shm/checksums": WeightsSettings(transport="shm"),
    "rpc": WeightsSettings(transport="rpc", verify="none"),
    "filesystem": WeightsSettings(transport="filesystem", verify="none"),
    "http": WeightsSettings(transport="http", verify="none"),
    "broadcast": WeightsSettings(transport="broadcast", verify="none"),
    "rdma/tcp": WeightsSettings(transport="rdma", rdma_backend="tcp", verify="none"),
}
"""Our own cases. Each has a store to itself: from a shared pool each would get memory that another has warmed."""


OURS = ("auto/", "shm/", "rpc/", "filesystem/", "http/", "broadcast/", "rdma/")
"""What the names of rows of our own transports begin with."""
RATES = ("publish_gb_per_s", "pull_gb_per_s")


def lots(cases: Sequence[str], num_bytes: int, num_free_bytes: int) -> list[list[str]]:
    """Cases that take turns, in order: as many at once as may each have `WARM_UP_ROUNDS` versions in memory."""
    size = max(1, int(MEMORY_SHARE * num_free_bytes / (WARM_UP_ROUNDS * num_bytes)))
    return [list(cases[start : start + size]) for start in range(0, len(cases), size)]


def free_bytes() -> int:
    """Memory of this machine that programs can have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def _over(row: dict[str, Any], limit: dict[str, Any]) -> dict[str, Any]:
    """A row with its rates over the limit's."""
    return row | {f"{figure.partition('_')[0]}_of_memcpy": row[figure] / limit[figure] for figure in RATES}


def _with_best(row: dict[str, Any], best: Mapping[str, float]) -> dict[str, Any]:
    """The row of `auto` with its rates over the best of our own transports; others as they are."""
    if not row["case"].startswith("auto/"):
        return row
    return row | {f"{figure.partition('_')[0]}_of_best": row[figure] / best[figure] for figure in RATES}


async def _both(writing: Awaitable[Any], reading: Awaitable[Any]) -> tuple[Any, Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(each)) for each in (writing, reading)]
    return tasks[0].result(), tasks[1].result()


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


NOTES = (
    "publish: from parameters in memory to a version that can be read; pull: from there into a reader's parameters.",
    "Rates are medians in steady state, when memory is used again. Our own publications find memory of the store "
    "reserved and the oldest version retired; in a run both happen while the learner steps.",
    f"{' and '.join(PER_TENSOR)} are given {MOST_TENSORS} tensors at most, and their rows count only those.",
    "gloo and memcpy keep nothing: no late reader, no old version beside the new one.",
    "The pause is the copy into a reader's parameters; an engine's own loading comes on top of it.",
    "coding: a delta of bfloat16 weights on one core, by the share that changed; `bench deltas` has more of them.",
)
