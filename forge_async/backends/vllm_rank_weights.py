"""The weights of an engine whose ranks hold them: loaded by all ranks together, read back and put together again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_async.weights.reshard import Wanted

if TYPE_CHECKING:
    from forge_async.backends.vllm_executor import Ranks

READ_ELEMENTS = 1 << 22
"""Parameters are read back so many elements at a time, so that no process holds the whole model."""


def build_on_ranks(ranks: Ranks, arguments: Mapping[str, Any]) -> tuple[Any, RankWeights]:
    """A vLLM engine whose model these ranks hold, and its weights."""
    from vllm import EngineArgs, LLMEngine

    from forge_async.backends.vllm_executor import RanksExecutor, on_ranks

    with on_ranks(ranks):
        engine = LLMEngine.from_engine_args(
            EngineArgs(**arguments, tensor_parallel_size=ranks.num_ranks, distributed_executor_backend=RanksExecutor)
        )
    executor: Any = engine.model_executor
    return engine, RankWeights(ranks, executor.held)


class RankWeights:
    """All methods are for the engine's thread."""

    def __init__(self, ranks: Ranks, held: Sequence[Sequence[Wanted]]) -> None:
        """`held`: the boxes of each rank."""
        self._ranks, self._held = ranks, held

    def load(self) -> None:
        """Have every rank copy the version that it has fetched; returns when all have."""
        self._ranks.call("load")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield (name, whole tensor) as it is served. A name comes once more for each further copy of a part of it."""
        sizes = {box.name: math.prod(box.global_shape) for boxes in self._held for box in boxes}
        asked: list[str] = []
        for name in names:
            if name not in sizes:
                continue
            asked.append(name)
            if sum(sizes[each] for each in asked) >= READ_ELEMENTS:
                yield from self._read(asked)
                asked = []
        if asked:
            yield from self._read(asked)

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        copies: dict[str, dict[tuple[int, ...], list[tuple[Wanted, Any]]]] = {name: defaultdict(list) for name in names}
        for found in self._ranks.call("read", list(names)):
            for box, tensor in found:
                if tensor.numel():
                    copies[box.name][box.offsets].append((box, tensor))
        for name, by_place in copies.items():
            for number in range(max(map(len, by_place.values()))):
                yield name, _whole([same[min(number, len(same) - 1)] for same in by_place.values()])


def _whole(boxes: Sequence[tuple[Wanted, Any]]) -> Any:
    """The whole parameter, or one box as it is when they do not fill it: its shape then tells."""
    import torch

    first, tensor = boxes[0]
    if sum(math.prod(box.shape) for box, _ in boxes) != math.prod(first.global_shape):
        return tensor
    whole = torch.empty(first.global_shape, dtype=tensor.dtype)
    for box, part in boxes:
        whole[tuple(slice(low, low + size) for low, size in zip(box.offsets, box.shape, strict=True))] = part
    return whole
