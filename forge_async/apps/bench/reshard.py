"""`bench reshard`: what it saves to plan a transfer between two layouts once and replay it for every version.

The learner is cut by rows over two ranks (FSDP2), or by rows and columns over four (FSDP2 x tensor parallel). The
reader is one of two tensor-parallel ranks: by turns it wants half the rows of a tensor, half the columns, or all of it.
`replayed` copies a version by a plan made before, `planned_anew` makes the plan first; nothing but memory lies between
the two ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from forge_async.apps.bench.output import Report
from forge_async.apps.bench.plan import Plan, in_another_process

ROWS, COLUMNS = 32, 32
"""Of each tensor: 4 kB in float32."""
NUM_TENSORS = 5000
MESHES = {"fsdp2_to_tp2": (2, 1), "fsdp2_tp2_to_tp2": (2, 2)}
"""Ranks of the learner along rows and columns, by case."""
AIM = 3.0
"""Times faster than planning anew."""


def measure(plan: Plan) -> Report:
    """Copy versions both ways, in turn, in a process of its own."""
    rows = [
        row
        for num_tensors in plan.tensors or (NUM_TENSORS,)
        for case in MESHES
        for row in in_another_process(_rows, case, num_tensors, plan.rounds)
    ]
    least = min(row["speedup"] for row in rows if "speedup" in row)
    notes = [
        f"A replayed transfer is at least {least:.1f} times as fast as one that is planned anew (aim: {AIM:g} times).",
        "pull_s: from blobs in memory to the reader's tensors; views of that memory are kept as a store's segments, "
        "which come back, allow.",
    ]
    return Report(bench="reshard", rows=rows, notes=notes)


def _rows(case: str, num_tensors: int, rounds: int) -> list[dict[str, Any]]:
    import torch

    from forge_async.core.versions import PolicyVersion
    from forge_async.weights.manifest import build_manifest
    from forge_async.weights.packing import Transfer, pack

    torch.set_num_threads(1)
    packed = [pack(boxes, rank) for rank, boxes in enumerate(_learner(MESHES[case], num_tensors))]
    manifest = build_manifest(PolicyVersion(), [part for part, _ in packed])
    blobs = {rank: blob for rank, (_, blob) in enumerate(packed)}
    wanted = _reader(num_tensors)
    held = [torch.zeros(box.shape) for box in wanted]
    known = Transfer(wanted, shared=True)
    known.follow(manifest.layout)
    targets = known.targets(held)

    def replay() -> None:
        torch._foreach_copy_(targets, known.sources(blobs))

    def plan_anew() -> None:
        transfer = Transfer(wanted, shared=True)
        transfer.follow(manifest.layout)
        torch._foreach_copy_(transfer.targets(held), transfer.sources(blobs))

    times: dict[str, list[float]] = {"replayed": [], "planned_anew": []}
    replay()
    for _ in range(max(3, rounds)):
        times["replayed"].append(_timed(replay))
        times["planned_anew"].append(_timed(plan_anew))
    pull_s = {kind: median(found) for kind, found in times.items()}
    num_bytes = sum(tensor.nbytes for tensor in held)
    rows: list[dict[str, Any]] = [
        {"case": f"{case}/{kind}", "tensors": num_tensors, "bytes": num_bytes, "pull_s": pull_s[kind]} for kind in times
    ]
    rows[0]["speedup"] = pull_s["planned_anew"] / pull_s["replayed"]
    return rows


def _timed(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _learner(mesh: tuple[int, int], num_tensors: int) -> list[list[Any]]:
    """The boxes of each rank of a mesh of rows and columns."""
    import torch

    from forge_async.weights.packing import LocalShard

    height, width = ROWS // mesh[0], COLUMNS // mesh[1]
    places = [(row, column) for row in range(mesh[0]) for column in range(mesh[1])]
    return [
        [
            LocalShard(
                name=f"layers.{number}.weight",
                tensor=torch.full((height, width), float(number)),
                global_shape=(ROWS, COLUMNS),
                offsets=(row * height, column * width),
            )
            for number in range(num_tensors)
        ]
        for row, column in places
    ]


def _reader(num_tensors: int) -> list[Any]:
    """What the second of two tensor-parallel ranks wants."""
    from forge_async.weights.reshard import Wanted

    halves = [
        ((ROWS // 2, 0), (ROWS // 2, COLUMNS)),
        ((0, COLUMNS // 2), (ROWS, COLUMNS // 2)),
        ((0, 0), (ROWS, COLUMNS)),
    ]
    return [
        Wanted(
            name=f"layers.{number}.weight",
            dtype="float32",
            global_shape=(ROWS, COLUMNS),
            offsets=halves[number % 3][0],
            shape=halves[number % 3][1],
        )
        for number in range(num_tensors)
    ]
