"""Segments as unlike shared memory as this machine allows: what a GPU's would be to the code around them.

numpy does not see them, and what a client writes to them is there when it has waited for it, and not before.
"""

from __future__ import annotations

from pathlib import Path

import torch

from forge_async.weights.segments import Segment


class Far(torch.Tensor):
    """Bytes that have to be copied to this process's memory before numpy can look at them."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            raise TypeError("far memory is not numpy's")
        result = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.copy_:
            return args[0]  # whatever it is copied from
        is_copied_here = func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in args)
        return result.clone().as_subclass(torch.Tensor) if is_copied_here else result


class FileMemory:
    """A file for each segment."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def create(self, number: int, num_bytes: int) -> Segment:
        path = self._folder / str(number)
        path.write_bytes(bytes(num_bytes))
        return Segment(id=number, num_bytes=num_bytes, address=str(path))

    def tensor(self, segment: Segment) -> torch.Tensor:
        return _mapped(segment)

    def destroy(self, segment: Segment) -> None:
        Path(segment.address).unlink()


class FileAccess:
    """Such files, written to late, by one client."""

    def __init__(self) -> None:
        self.num_settled = 0
        self._begun: dict[int, tuple[Segment, torch.Tensor]] = {}

    def open(self, segment: Segment, *, writable: bool) -> torch.Tensor:
        if not writable:
            return _mapped(segment).as_subclass(Far)
        memory = torch.zeros(segment.num_bytes, dtype=torch.uint8)
        self._begun[segment.id] = segment, memory
        return memory.as_subclass(Far)

    def settle(self) -> None:
        self.num_settled += 1
        for segment, memory in list(self._begun.values()):  # others are opened meanwhile, on other threads
            if Path(segment.address).exists():
                _mapped(segment).copy_(memory)


def _mapped(segment: Segment) -> torch.Tensor:
    return torch.from_file(segment.address, shared=True, size=segment.num_bytes, dtype=torch.uint8)
