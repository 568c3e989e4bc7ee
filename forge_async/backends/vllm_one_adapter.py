"""vLLM's products with low-rank adapters, on a CPU, for an engine with one adapter. Imported by vLLM, by its name.

vLLM 0.32's own gather a copy of the adapter for every token of a step. Where all tokens have the same one, two matrix
products do: with adapters on all linear layers of SmolLM2 they cost an eighth of the throughput, and vLLM's two thirds.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):
    """Every token has the adapter in slot 0."""

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
        start = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            y[:, start : start + width].addmm_(x @ a[0, 0].T, b[0, 0].T)
            start += width
