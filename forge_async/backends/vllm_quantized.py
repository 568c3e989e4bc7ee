"""Linear layers that an engine keeps quantised, made anew from each version's weights (`policy.quantize`).

Rows of a weight and rows of activations have a scale each, their largest magnitude over the largest number of the
format: symmetric, per channel and per token, as compressed-tensors names it. vLLM computes with its own kernels.

What a kernel has packed cannot be read back, but it can be multiplied: rows of small whole numbers have the scale 1 and
exact products, so that a layer which computes them holds what was loaded. Written against vLLM 0.32.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_async.backends.vllm_places import fused_parts, refuse_misfit
from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion

LARGEST = {"int8": 127.0, "fp8": 448.0}
"""Largest number of each format."""
NARROW = 63.0
"""Largest number of an int8 weight where the processor's sums of two products would overflow (x86 without VNNI)."""
SMALL = 8
"""Whole numbers up to this are exact in every format, and their products with a row add up exactly in float32."""
TOLERANCES = {"torch.float32": 1e-5, "torch.float16": 2**-9, "torch.bfloat16": 2**-7}
"""Largest difference of a product that passes, as a part of it: a few roundings."""
FP8_TOLERANCE = 1e-2
"""The same for fp8, as a part of the layer's largest product: its kernels add up in fewer bits than float32 has."""


def engine_arguments(quantize: str) -> dict[str, Any]:
    """What vLLM is told of `policy.quantize` at its start."""
    if quantize == "none":
        return {}
    number = {"num_bits": 8, "type": "int" if quantize == "int8" else "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False},
        "input_activations": number | {"strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "int-quantized" if quantize == "int8" else "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return {"hf_overrides": {"quantization_config": config}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    """A layer's weight, ready to take the place of the one before."""

    layer: Any
    """A copy of vLLM's module with this weight in it."""
    products: Any
    """float32 [2, rows], what it gives for `_small_rows`."""


class QuantizedLayers:
    """The quantised layers of one engine."""

    def __init__(self, model: Any, quantize: str, dtype: Any) -> None:
        """Args:
        model: vLLM's, built with `engine_arguments`.
        quantize: the format.
        dtype: of the weights that are given.
        """
        self._is_int8, self._dtype = quantize == "int8", dtype
        self._tolerance = max(TOLERANCES[str(dtype)], 0.0 if self._is_int8 else FP8_TOLERANCE)
        self._layers = {path: each for path, each in model.named_modules() if getattr(each, "scheme", None) is not None}
        self._parts = {path: _parts(model, path, layer) for path, layer in self._layers.items()}
        self._products: dict[str, Any] = {}
        self.names = frozenset(name for parts in self._parts.values() for name, _ in parts)
        """Hugging Face names of their weights."""
        self._given = LARGEST[quantize]
        """Largest number of an activation."""
        self._largest = self._given
        """Largest number of a weight."""
        if self._is_int8 and not self._is_exact():
            self._largest = NARROW

    def prepare(
        self, weights: Mapping[str, Any], version: PolicyVersion, served: PolicyVersion
    ) -> tuple[dict[str, Quantized], dict[str, Any]]:
        """Quantise a version's weights; to be called on any thread, beside the engine's steps.

        Returns the layers by path, and the weights of everything else.
        Raises WeightsError for the first weight that is missing or not as the engine takes it.
        """
        import torch

        with torch.no_grad():
            layers = {path: self._quantized(path, weights, version, served) for path in self._layers}
        if torch.cuda.is_available():  # the engine's thread copies on a stream of its own, which knows nothing of this
            torch.cuda.current_stream().synchronize()
        return layers, {name: tensor for name, tensor in weights.items() if name not in self.names}

    def write(self, layers: Mapping[str, Quantized]) -> None:
        """Have the engine compute with these layers. For the engine's thread."""
        for path, quantized in layers.items():
            _adopt(self._layers[path], quantized.layer)
            self._products[path] = quantized.products

    def first_wrong(self, names: Iterable[str]) -> str:
        """The first of these weights with which the engine does not compute what was loaded; "" if there is none."""
        import torch

        wanted = set(names)
        for path, parts in self._parts.items():
            if wanted.isdisjoint(name for name, _ in parts):
                continue
            layer, right = self._layers[path], self._products[path]
            with torch.no_grad():
                fits = self._fits(layer, right)
            start = 0
            for name, rows in parts:
                if name in wanted and not bool(fits[start : start + rows].all()):
                    return name
                start += rows
        return ""

    def _fits(self, layer: Any, right: Any) -> Any:
        """bool [rows]: whether a layer gives these products, float32 [2, rows], for `_small_rows`."""
        given = _small_rows(layer.input_size_per_partition, self._given).to(right.device, self._dtype)
        found = layer.scheme.apply_weights(layer, given, None).float()
        size = right.abs() if self._is_int8 else right.abs().max()
        return ((found - right).abs() <= self._tolerance * size).all(dim=0)

    def _is_exact(self) -> bool:
        """Whether the largest products add up as they should."""
        import torch

        layer = next(iter(self._layers.values()))
        rows, columns = sum(layer.logical_widths), layer.input_size_per_partition
        device, given = layer.weight_scale.device, _small_rows(columns, self._given)
        with torch.no_grad():
            matrix = torch.full((rows, columns), int(self._largest), dtype=torch.int8, device=device)
            made = _packed(layer, matrix, torch.ones(rows, 1, device=device), self._dtype)
            right = (given.sum(dim=1, keepdim=True) * self._largest).expand(-1, rows).to(device)
            return bool(self._fits(made, right).all())

    def _quantized(
        self, path: str, weights: Mapping[str, Any], version: PolicyVersion, served: PolicyVersion
    ) -> Quantized:
        import torch

        layer, parts = self._layers[path], self._parts[path]
        columns = layer.input_size_per_partition
        for name, rows in parts:
            if name not in weights:
                raise WeightsError(f"{version} has no {name}, which a quantised engine needs whole; publish it whole.")
            refuse_misfit(name, weights[name], (rows, columns), self._dtype, version, served)
        device = layer.weight_scale.device
        whole = torch.cat([weights[name].to(device) for name, _ in parts]).float()
        scale = (whole.abs().amax(dim=1, keepdim=True) / self._largest).clamp_min(torch.finfo(torch.float32).tiny)
        whole = whole.div_(scale).clamp_(-self._largest, self._largest)
        if self._is_int8:
            matrix = whole.round_().to(torch.int8)
        else:
            matrix = whole.to(torch.float8_e4m3fn)
            whole = matrix.float()
        given = _small_rows(columns, self._given).to(device)
        return Quantized(layer=_packed(layer, matrix, scale, self._dtype), products=given @ whole.T * scale.T)


def _parts(model: Any, path: str, layer: Any) -> list[tuple[str, int]]:
    """(Hugging Face name of a weight, its rows) of each that is in a layer of vLLM's, in order."""
    return [(f"{part}.weight", rows) for part, rows in zip(fused_parts(model, path), layer.logical_widths, strict=True)]


def _small_rows(columns: int, largest: float) -> Any:
    """float32 [2, columns]: whole numbers up to SMALL, the same ones always, and first the format's largest one, which
    makes the scale of the row 1."""
    import torch

    rows = torch.randint(-SMALL, SMALL + 1, (2, columns), generator=torch.Generator().manual_seed(columns)).float()
    rows[:, 0] = largest
    return rows


def _packed(layer: Any, matrix: Any, scale: Any, dtype: Any) -> Any:
    """A copy of vLLM's layer with this weight, packed as its kernel wants it; the layer itself is left alone."""
    import torch

    made, kept = copy.copy(layer), torch.nn.Parameter
    made._parameters, made._buffers = dict(layer._parameters), dict(layer._buffers)
    made.scheme = copy.copy(layer.scheme)
    scale = kept(scale, requires_grad=False)
    kernel = getattr(layer.scheme, "kernel", None)
    if kernel is not None and hasattr(kernel, "dnnl_handler"):
        made.scheme.kernel = _packed_for_onednn(kernel, made, matrix, scale, dtype)
        return made
    made.weight, made.weight_scale = kept(matrix, requires_grad=False), scale
    for name, own in (("kernel", kernel), ("fp8_linear", getattr(layer.scheme, "fp8_linear", None))):
        if own is not None:
            setattr(made.scheme, name, copy.copy(own))
    made.scheme.process_weights_after_loading(made)
    return made


def _packed_for_onednn(kernel: Any, layer: Any, matrix: Any, scale: Any, dtype: Any) -> Any:
    """What vLLM's kernel does after loading, for a `dtype` that need not be torch's default one at that moment."""
    import torch
    from vllm import _custom_ops as ops

    made, weight = copy.copy(kernel), matrix.t()
    sums = weight.sum(dim=0, keepdim=True, dtype=torch.float32) * scale.squeeze(1)
    layer.weight_scale, layer.azp_adj = scale, torch.nn.Parameter(sums, requires_grad=False)
    made.dnnl_handler = ops.create_onednn_scaled_mm(weight, scale, dtype, True, False, 32)
    made.linear_method = made._apply_weights_onednn
    return made


def _adopt(layer: Any, made: Any) -> None:
    """Have vLLM's layer compute with what a copy of it was given."""
    if layer.weight_scale.device.type == "cpu":
        # A packed weight keeps the address of its scales, so that both must come, and go, together.
        layer._parameters.update(made._parameters)
        layer.scheme = made.scheme
        return
    for name, held in layer._parameters.items():  # in place, for captured graphs know the addresses
        if held is not None:
            held.data.copy_(made._parameters[name])
