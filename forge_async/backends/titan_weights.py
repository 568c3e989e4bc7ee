"""A learner's parameters under Hugging Face's names: this rank's boxes of them, to publish, and the whole of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from forge_async.backends import titan_lora, titan_moe

# isort: split
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from forge_async.core.rng import derive_seed
from forge_async.weights.adapters import LORA_B, is_adapter, merged
from forge_async.weights.packing import LocalShard

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> its bits as a number."""


class NamedWeights:
    """The parameters of one learner's model; the optimiser changes their tensors in place."""

    def __init__(
        self, model: Any, names: Any, *, rank: int, dtype: torch.dtype, lora_scale: float, merges: bool
    ) -> None:
        """Args:
        model, names: torchtitan's model and its adapter of names.
        rank: this process's, of all learner ranks.
        dtype: of what is published.
        lora_scale: what the products of adapters are multiplied by.
        merges: whether adapters are published as part of the weights that they change.
        """
        self._model, self._names = model, names
        self._rank, self._dtype, self._scale, self._merges = rank, dtype, lora_scale, merges
        self._found: list[tuple[str, Any]] | None = None

    def shards(self, wanted: Callable[[str], bool]) -> Iterator[LocalShard]:
        """This rank's boxes of the parameters whose names are wanted, to be packed as they are published.

        They are the parameters' own memory, but for what is merged or scaled. Collective where adapters are merged.
        """
        whole = dict(self.full(is_adapter)) if self._merges else {}
        products = titan_lora.products(whole, self._scale)
        for name, parameter in self._named():
            if not wanted(name) or (self._merges and is_adapter(name)):
                continue
            box = self._box(parameter)
            if box is None:
                continue
            tensor, shape, offsets = box
            if name in products:
                (a, b), (rows, columns) = products[name], zip(offsets, tensor.shape, strict=True)
                tensor = merged(tensor, a.narrow(1, *columns), b.narrow(0, *rows))
            elif name.endswith(LORA_B):
                tensor = tensor * self._scale
            yield LocalShard(name=name, tensor=tensor, global_shape=shape, offsets=offsets, dtype=self._dtype)

    def checksum(self, wanted: Callable[[str], bool]) -> int:
        """Of this rank's boxes of the parameters whose names are wanted, as they are held: the sum over all ranks,
        modulo 2**64, is the same on any number of them."""
        total = 0
        for name, parameter in self._named():
            box = self._box(parameter) if wanted(name) else None
            if box is not None:
                bits = box[0].contiguous().view(_BITS[box[0].element_size()])
                total += (derive_seed(0, name) | 1) * int(bits.sum(dtype=torch.int64))
        return (total + 2**63) % 2**64 - 2**63

    def full(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) of the parameters whose names are wanted, sorted; collective."""
        return titan_moe.full_weights((name, parameter) for name, parameter in self._named() if wanted(name))

    def _named(self) -> list[tuple[str, Any]]:
        """(Hugging Face name, parameter or OneExpert), sorted."""
        if self._found is None:
            adapters = titan_lora.adapters(self._model.state_dict(), self._names)
            self._found = sorted([*titan_moe.named_parameters(self._model, self._names), *adapters], key=_name_of)
        return self._found

    def _box(self, parameter: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]] | None:
        """What this rank speaks for of a parameter: tensor, the whole's shape, where it lies; None for nothing."""
        expert = parameter if isinstance(parameter, titan_moe.OneExpert) else None
        held: Any = expert.stack if expert else parameter
        tensor = held.detach()
        shape, offsets = tuple(tensor.shape), (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            if not _holds_first_copy(tensor):
                return None
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            tensor = tensor.to_local()
        elif self._rank != 0:
            return None
        if expert is None:
            return tensor, shape, tuple(offsets)
        tensor = expert.box(tensor, tuple(offsets))
        return None if tensor is None else (tensor, expert.shape, tuple(offsets[1:]))


def _name_of(named: tuple[str, Any]) -> str:
    return named[0]


def _holds_first_copy(tensor: DTensor) -> bool:
    """Is this rank the one that speaks for its shard, among those that hold the same one?"""
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return all(
        not isinstance(placement, Replicate) or place == 0
        for placement, place in zip(tensor.placements, coordinate, strict=True)
    )
