"""Where vLLM keeps each expert's matrices, to be read and written there in Hugging Face's form, bit for bit.

vLLM lays gate and up of all experts into one parameter and down into another, and on CPU rearranges each expert's
elements for its kernel ("prepacks" them), once, after the first load. A later load in vLLM's own way would write plain
matrices into the rearranged parameters, and the experts would compute nonsense without an error. So experts are written
here, to the places where their elements lie; the same places are read for the fingerprint.

On an engine of several ranks each has a slice of every expert: rows of gate and up, columns of down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from forge_async.core.errors import PolicyError

SUFFIX = ".routed_experts"
"""Last part of the path of vLLM's module that holds the experts of a layer."""
DIGIT_BITS = 8
"""So large a number is exact in every dtype that an engine computes in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlace:
    """Where one matrix of one expert lies, or what a rank has of it, or a box of that: `place[rows, columns]`."""

    layer: Any
    """vLLM's module; it may hand out another tensor under the same name later."""
    parameter: str
    """Name of the parameter of all experts."""
    expert: int
    places: Any
    """int64 [rows, columns], where each element of the matrix lies among those of the expert."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.places.shape)

    @property
    def dtype(self) -> Any:
        """Of the matrix."""
        return getattr(self.layer, self.parameter).dtype

    def __getitem__(self, box: tuple[slice, ...]) -> ExpertPlace:
        """Where a box of the matrix lies."""
        return replace(self, places=self.places[box])

    def read(self) -> Any:
        """A copy of the matrix."""
        return self._elements()[self.places]

    def write(self, matrix: Any) -> None:
        """Replace the matrix."""
        self._elements().index_copy_(0, self.places.flatten(), matrix.to(self.places.device).reshape(-1))

    def _elements(self) -> Any:
        return getattr(self.layer, self.parameter).data[self.expert].view(-1)


def expert_places(model: Any) -> dict[str, ExpertPlace]:
    """Hugging Face name -> place, of every matrix of every expert of vLLM's model; empty for a dense one.

    Raises PolicyError when the experts lie in a way that is not known here.
    """
    return {
        name: place
        for path, module in model.named_modules()
        if path.endswith(SUFFIX)
        for name, place in places_of_layer(path, module)
    }


def write(targets: Sequence[Any], sources: Sequence[Any]) -> None:
    """Replace what lies at targets, views of an engine's parameters and places of experts, by sources, in order."""
    import torch

    pairs = list(zip(targets, sources, strict=True))
    views = [(target, source) for target, source in pairs if not isinstance(target, ExpertPlace)]
    with torch.no_grad():
        if views:
            torch._foreach_copy_([target for target, _ in views], [source for _, source in views])
        for target, source in pairs:
            if isinstance(target, ExpertPlace):
                target.write(source)


def places_of_layer(path: str, layer: Any) -> Iterator[tuple[str, ExpertPlace]]:
    """(Hugging Face name, place) of every matrix of every expert of vLLM's module at `path`, or of this rank's slices.

    Raises PolicyError when the experts lie in a way that is not known here.
    """
    if layer.local_num_experts != layer.global_num_experts:
        raise PolicyError(f"vLLM spreads whole experts of {path} over the ranks of an engine; that is not known here.")
    config, isa, parent = layer.moe_config, _prepacked_for(layer), path.removesuffix(SUFFIX)
    gate_up, down = (
        _places(tuple(each.shape[1:]), each.dtype, isa, each.device) for each in (layer.w13_weight, layer.w2_weight)
    )
    rows, columns = config.intermediate_size // config.tp_size, config.hidden_dim_unpadded or config.hidden_dim
    up_row = gate_up.shape[0] // 2  # kernels may want more rows than the model has
    matrices = {
        "gate_proj": ("w13_weight", gate_up[:rows, :columns]),
        "up_proj": ("w13_weight", gate_up[up_row : up_row + rows, :columns]),
        "down_proj": ("w2_weight", down[:columns, :rows]),
    }
    for expert in range(layer.local_num_experts):
        for matrix, (parameter, places) in matrices.items():
            place = ExpertPlace(layer=layer, parameter=parameter, expert=expert, places=places)
            yield f"{parent}.{expert}.{matrix}.weight", place


def _prepacked_for(layer: Any) -> str:
    """What vLLM's CPU kernel was told when it prepacked the layer; "" where parameters are plain matrices."""
    method = layer.quant_method
    experts = method.moe_kernel.fused_experts
    isa = getattr(experts, "isa", None)
    if isa is not None:
        return "" if experts._use_zentorch else isa
    if method.unquantized_backend.name == "TRITON":
        return ""
    raise PolicyError(f"vLLM's {type(experts).__name__} keeps experts in a form that is not known here.")


@cache
def _places(shape: tuple[int, int], dtype: Any, isa: str, device: Any) -> Any:
    """int64 [rows, columns]: where each element of a matrix lies once vLLM has prepacked it.

    Found by prepacking the numbers of the elements themselves, digit by digit, since a dtype holds only small ones.
    """
    import torch

    numbers = torch.arange(shape[0] * shape[1])
    if not isa:
        return numbers.view(shape).to(device)
    from vllm._custom_ops import cpu_prepack_moe_weight

    found = torch.zeros_like(numbers)
    for shift in range(0, max(len(numbers) - 1, 1).bit_length(), DIGIT_BITS):
        digits = (numbers >> shift) % (1 << DIGIT_BITS)
        packed = cpu_prepack_moe_weight(digits.to(dtype).view(1, *shape), isa)
        found += packed.view(-1).long() << shift
    if not torch.equal(found.sort().values, numbers):
        raise PolicyError(f"vLLM does more than rearrange the elements of experts of shape {shape} for {isa}.")
    return found.argsort().view(shape)
