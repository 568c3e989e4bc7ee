"""Where vLLM keeps each Hugging Face parameter: to be replaced there by one copy, and to be read back.

vLLM fuses linear layers (q, k and v in one; gate and up in one) and pads embeddings to a round vocabulary. The places
are found once, as views of its parameters; `vllm_experts.py` knows those of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from forge_async.backends.vllm_experts import ExpertPlace, expert_places, write
from forge_async.core.errors import WeightsError
from forge_async.core.versions import PolicyVersion


class Places:
    """The parameters of one engine that holds the whole model. What has no place here is left to vLLM to load."""

    def __init__(self, model: Any, sealed: frozenset[str] = frozenset()) -> None:
        """Args:
        model: vLLM's, after its first load.
        sealed: names that have no place here, whatever vLLM keeps under them: some kernels for quantised layers leave
            what they have packed there.
        """
        self._model = model
        views = {name: each for name, each in _views(model) if name not in sealed}
        self._held: dict[str, Any] = views | expert_places(model)
        """Views, and places of experts."""

    def check(self, weights: Mapping[str, Any], version: PolicyVersion, served: PolicyVersion) -> None:
        """Raise WeightsError for the first tensor that is not as the engine holds it.

        Args:
            version: of the weights.
            served: what the engine goes on with.
        """
        for name, tensor in weights.items():
            held = self._held.get(name)
            if held is not None:
                refuse_misfit(name, tensor, tuple(held.shape), held.dtype, version, served)

    def write(self, weights: Mapping[str, Any]) -> None:
        """Replace parameters; every tensor fits."""
        import torch

        known = {name: tensor for name, tensor in weights.items() if name in self._held}
        write([self._held[name] for name in known], list(known.values()))
        others = [(name, tensor) for name, tensor in weights.items() if name not in known]
        if others:
            with torch.no_grad():
                self._model.load_weights(iter(others))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """(name, tensor) of what is served, for the names that have a place."""
        for name in names:
            held = self._held.get(name)
            if held is not None:
                yield name, held.read() if isinstance(held, ExpertPlace) else held


def refuse_misfit(
    name: str, tensor: Any, shape: tuple[int, ...], dtype: Any, version: PolicyVersion, served: PolicyVersion
) -> None:
    """Raise WeightsError unless the tensor has the shape and the dtype that the engine holds, or takes."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise WeightsError(
            f"{version} has {name} as {tensor.dtype} {tuple(tensor.shape)}, and the engine holds {dtype} {shape}; it "
            f"goes on with {served}. Check model.path, policy.dtype and what is published."
        )


def fused_parts(model: Any, path: str) -> list[str]:
    """Hugging Face's paths of the layers that vLLM's layer at `path` is made of, in order; its own if not fused."""
    parent, _, leaf = path.rpartition(".")
    return [f"{parent}.{part}" for part in getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])]


def _views(model: Any) -> Iterator[tuple[str, Any]]:
    """(Hugging Face name, exactly that parameter), also of what vLLM keeps under no such name alone."""
    parameters = {name.replace(".base_layer.", "."): each for name, each in model.named_parameters()}
    yield from ((name, each.detach()) for name, each in parameters.items())
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")  # a layer with an adapter around it keeps the name that it has without
        if hasattr(module, "org_vocab_size") and f"{path}.weight" in parameters:
            yield f"{path}.weight", parameters[f"{path}.weight"].detach().narrow(0, 0, module.org_vocab_size)
        parts = fused_parts(model, path)
        if parts == [path] or not hasattr(module, "output_sizes"):
            continue
        start = 0
        for part, rows in zip(parts, module.output_sizes, strict=True):
            for kind, _ in module.named_parameters(recurse=False):
                whole = parameters[f"{path}.{kind}"].detach()
                if whole.dim() and whole.shape[0] == sum(module.output_sizes):
                    yield f"{part}.{kind}", whole.narrow(0, start, rows)
            start += rows
