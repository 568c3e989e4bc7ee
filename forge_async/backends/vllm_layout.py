"""Which box of each Hugging Face parameter a rank of vLLM holds, and where: the layout that a pull is planned for.

Read off vLLM's own modules, by the attributes with which they load checkpoints. Written against vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forge_async.backends.vllm_experts import SUFFIX, ExpertPlace, places_of_layer
from forge_async.core.errors import PolicyError
from forge_async.weights.reshard import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A box of a Hugging Face parameter inside a parameter of the engine."""

    box: Wanted
    place: Any
    """Exactly the box, to be read and written: a view, or an expert's `ExpertPlace`."""

    def read(self) -> Any:
        """A copy of the box, in the memory of this process."""
        return self.place.read().cpu() if isinstance(self.place, ExpertPlace) else self.place.cpu().clone()


def held_boxes(model: Any, rank: int) -> list[Held]:
    """What a tensor-parallel rank holds of each parameter, sorted by name.

    Raises PolicyError for a model whose layout is not known here.
    """
    names = {name for name, _ in model.named_parameters()}  # of tied ones the first, as in a checkpoint
    found = [each for path, module in model.named_modules() for each in _of_module(model, path, module, rank)]
    missing = names - {name for name, _ in found}
    if missing:
        raise PolicyError(
            f"How {min(missing)} lies on several ranks is not known; use policy.tensor_parallel=1 for this model."
        )
    return sorted((each for name, each in found if name in names), key=lambda each: each.box.name)


def _of_module(model: Any, path: str, module: Any, rank: int) -> Iterator[tuple[str, Held]]:
    """(engine's name of a parameter, a box in it) of a module's own parameters."""
    if path.endswith(SUFFIX):
        yield from _experts(path, module, rank)
        return
    parent, _, leaf = path.rpartition(".")
    parts = getattr(model, "packed_modules_mapping", {}).get(leaf)
    for kind, parameter in module.named_parameters(recurse=False):
        name = f"{path}.{kind}"
        if hasattr(module, "shard_indices"):
            yield name, _vocabulary(name, parameter, module)
        elif parts and hasattr(module, "output_sizes"):
            yield from ((name, each) for each in _fused(parent, parts, kind, parameter, module, rank))
        elif parameter.dim() <= 2:
            yield name, _plain(name, parameter, module, rank)


def _experts(path: str, module: Any, rank: int) -> Iterator[tuple[str, Held]]:
    """A slice of every expert: rows of gate and up, columns of down."""
    for name, place in places_of_layer(path, module):
        dim = 1 if place.parameter == "w2_weight" else 0
        yield f"{path}.{place.parameter}", _slice(name, place, dim, module.moe_config.tp_size, rank)


def _vocabulary(name: str, parameter: Any, module: Any) -> Held:
    """Rows of the tokens that this rank has; what pads them to a round number is in no checkpoint."""
    indices = module.shard_indices
    start, rows = indices.org_vocab_start_index, indices.org_vocab_end_index - indices.org_vocab_start_index
    whole = (module.org_vocab_size, *parameter.shape[1:])
    return _held(name, whole, 0, start, parameter.detach().narrow(0, 0, rows))


def _fused(parent: str, parts: list[str], kind: str, parameter: Any, module: Any, rank: int) -> Iterator[Held]:
    """The projections that lie one after the other in one parameter: q, k and v, or gate and up."""
    at = 0
    for part, (rows, start, whole) in zip(parts, _rows_of_parts(module, rank), strict=True):
        tensor = parameter.detach().narrow(0, at, rows)
        yield _held(f"{parent}.{part}.{kind}", (whole, *parameter.shape[1:]), 0, start, tensor)
        at += rows


def _rows_of_parts(module: Any, rank: int) -> list[tuple[int, int, int]]:
    """(rows here, first row, rows of the whole) of each fused projection. A head of keys may be on several ranks."""
    if not hasattr(module, "num_kv_heads"):
        ranks = module.tp_size
        return [(rows // ranks, rank * (rows // ranks), rows) for rows in module.output_sizes]
    queries, keys = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
    first_key = rank // module.num_kv_head_replicas * keys
    whole_keys = module.total_num_kv_heads * module.head_size
    return [
        (queries, rank * queries, module.total_num_heads * module.head_size),
        (keys, first_key, whole_keys),
        (keys, first_key, whole_keys),
    ]


def _plain(name: str, parameter: Any, module: Any, rank: int) -> Held:
    """A parameter that is cut along one dimension, as its linear layer is, or not at all."""
    dim, ranks = 0, 1
    if parameter.dim() == 2 and _is_cut(module, "input_size"):
        dim, ranks = 1, module.tp_size
    elif _is_cut(module, "output_size"):
        ranks = module.tp_size
    return _slice(name, parameter.detach(), dim, ranks, rank)


def _slice(name: str, place: Any, dim: int, ranks: int, rank: int) -> Held:
    """What a rank has of a parameter that is cut evenly along a dimension, or not at all where `ranks` is 1."""
    whole = list(place.shape)
    whole[dim] *= ranks
    return _held(name, tuple(whole), dim, rank * place.shape[dim] if ranks > 1 else 0, place)


def _is_cut(module: Any, size: str) -> bool:
    whole = getattr(module, size, None)
    return whole is not None and getattr(module, f"{size}_per_partition", whole) != whole


def _held(name: str, whole: tuple[int, ...], dim: int, start: int, place: Any) -> Held:
    offsets = [0] * len(whole)
    offsets[dim : dim + 1] = [start] * min(1, len(whole))
    box = Wanted(
        name=name,
        dtype=str(place.dtype).removeprefix("torch."),
        global_shape=tuple(whole),
        offsets=tuple(offsets),
        shape=tuple(place.shape),
    )
    return Held(box=box, place=place)
