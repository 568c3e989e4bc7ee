"""vLLM's products with low-rank adapters, on a CPU. Imported by vLLM, by its name.

vLLM 0.32's own gather a copy of the adapter for every token of a step. Two matrix products for each adapter that a
step's tokens have do as well, and mostly that is one: with adapters on all linear layers of SmolLM2 they cost an eighth
of the throughput, and vLLM's two thirds.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class AdapterProducts(PunicaWrapperCPU):
    """The tokens of a step, by the slot of their adapter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_slot: list[tuple[int, torch.Tensor | None]] = []
        """(slot, its tokens' places in the step: int64 [n], or None for all of them)."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        """Before each step: which adapter each of its tokens has."""
        super().update_metadata(*args, **kwargs)
        slots = self.token_lora_indices
        found = slots.unique().tolist()
        everywhere = len(found) == 1
        self._by_slot = [
            (slot, None if everywhere else (slots == slot).nonzero().flatten()) for slot in found if slot >= 0
        ]

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """Add x A B to y [T, out] in place, for each of the layers that are fused into one.

        Args:
            x: [T, in].
            lora_a_stacked: of each layer [slots, 1, rank, in].
            lora_b_stacked: of each layer [slots, 1, out, rank], with the scale multiplied in.
            scale: 1, as vLLM gives it for linear layers.
            output_slices: width of each layer in y.
        """
        for slot, places in self._by_slot:
            start, own = 0, x if places is None else x[places]
            for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                part, inner, outer = y[:, start : start + width], own @ a[slot, 0].T, b[slot, 0].T
                if places is None:
                    part.addmm_(inner, outer)
                else:
                    part.index_add_(0, places, inner @ outer)
                start += width
