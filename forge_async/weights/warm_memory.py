"""Memory of this process that is used again when nobody needs it any more: its pages need not be found anew."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KEPT = 2
"""Pieces that are kept at most while nobody uses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warm:
    """A piece of memory on loan."""

    tensor: torch.Tensor
    """uint8 [num_bytes], of any contents: the loan ends with the last of its views."""
    below: torch.Tensor
    """The same bytes, as the one object that they are on every loan: for who remembers memory by its storage."""
    discard: Callable[[], object]
    """Have the memory not used again, because something may still write to it."""


class WarmMemory:
    """Lends memory, and takes it back by itself."""

    def __init__(self) -> None:
        self._spare: deque[torch.Tensor] = deque(maxlen=KEPT)
        """Changed by single operations of the deque only: tensors may end on any thread, in the middle of anything."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], of any contents, to be used again when the last of its views is gone."""
        return self.lend(num_bytes).tensor

    def lend(self, num_bytes: int) -> Warm:
        """The same, with what lies below it."""
        import torch

        below = self._memory(num_bytes)
        lent = below.numpy()[:]  # the tensor and its views hold this array: its end tells that they are gone
        ending = weakref.finalize(lent, self._spare.append, below)
        ending.atexit = False
        return Warm(tensor=torch.from_numpy(lent), below=below, discard=ending.detach)

    def _memory(self, num_bytes: int) -> torch.Tensor:
        import torch

        with suppress(IndexError):
            while (spare := self._spare.popleft()).numel() != num_bytes:
                pass
            return spare
        return torch.empty(num_bytes, dtype=torch.uint8)
