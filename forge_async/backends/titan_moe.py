"""Mixtures of experts in torchtitan: layers by Hugging Face's sizes, exact experts, forced routing, single experts.

torchtitan's load balancing by a bias (`load_balance_coeff`) is off: the bias moves which experts a token takes, neither
transformers nor vLLM has it, so a learner that used it would train another model than the one that samples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_async.backends import titan_cpu  # noqa: F401 - before any other part of torchtitan

# isort: split
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch.distributed.tensor import DTensor
from torchtitan.models import qwen3
from torchtitan.models.common.moe import GroupedExperts, TokenChoiceTopKRouter

from forge_async.learner.mixture import has_experts, num_experts

STACKED = (".w1_EFD", ".w2_EDF", ".w3_EFD")
"""Ends of the names of parameters that hold all experts of a layer."""


class ReplayRouter(TokenChoiceTopKRouter):
    """Top-k routing whose choice can be forced; the weights of the chosen are always the router's own.

    So the gradient reaches the router through the weights, as it does without forcing (Ma et al. 2025, "Stabilizing MoE
    reinforcement learning by aligning training and inference routers"; "routing replay" in the GSPO paper, Zheng et al.
    2025).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        """As the base class."""

    forced: torch.Tensor | None = None
    """Integer [B, L, K]; an entry that is no expert's number leaves its token's choice to the router."""
    counted: torch.Tensor | None = None
    """bool [B, L], the tokens whose choices are counted, in passes with a gradient."""
    counts: torch.Tensor | None = None
    """int64 [E], how many of them took each expert, the last pass left out."""
    last: torch.Tensor | None = None
    """int64 [B, L, K], what the last pass with a gradient chose, to be counted when it is over: a backward pass that
    computes anew must find the same operations as the forward pass."""

    def forward(self, x_BLD, expert_bias_E=None):  # noqa: N803 - torchtitan's own names
        weights, chosen, scores = super().forward(x_BLD, expert_bias_E)
        if self.forced is not None:
            weights, chosen = self._as_forced(self.forced, chosen, scores)
        if torch.is_grad_enabled():
            self.last = chosen
        return weights, chosen, scores

    def count(self) -> None:
        """Add the last pass to the counts."""
        if self.last is not None and self.counted is not None:
            found = torch.bincount(self.last[self.counted].flatten(), minlength=self.num_experts)
            self.counts = found if self.counts is None else self.counts + found
        self.last = None

    def _as_forced(
        self, forced: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        forced = forced.to(chosen.dtype)
        chosen = torch.where((forced < self.num_experts).all(-1, keepdim=True), forced, chosen)
        weights = scores.gather(-1, chosen)
        if self.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.route_scale, chosen


class ExactExperts(GroupedExperts):
    """Experts that compute in the dtype of what they are given. torchtitan's own always compute in bfloat16."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As the base class."""

    def forward(self, x_RD, num_tokens_per_expert_E):  # noqa: N803 - torchtitan's own names
        if x_RD.dtype == torch.bfloat16 and not titan_cpu.ON_CPU:
            return super().forward(x_RD, num_tokens_per_expert_E)
        w1, w2, w3 = map(_local, (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        counts = num_tokens_per_expert_E.tolist()
        parts = x_RD[: sum(counts)].split(counts)
        made = [F.linear(F.silu(F.linear(part, w1[i])) * F.linear(part, w3[i]), w2[i]) for i, part in enumerate(parts)]
        made.append(x_RD.new_zeros(len(x_RD) - sum(counts), x_RD.shape[1]))
        return torch.cat(made)


def moe_layers(config: Mapping[str, Any], common: Mapping[str, Any], dense: list[Any]) -> list[Any]:
    """torchtitan's layers of a Qwen3-MoE: dense ones where its config.json says so.

    Args:
        config: the folder's config.json.
        common: what torchtitan's builders of dense and of MoE layers both take.
        dense: the layers as they were if none had experts.
    """
    layers = qwen3._build_qwen3_moe_layers(
        **common,
        moe_hidden_dim=config["moe_intermediate_size"],
        num_experts=num_experts(config),
        top_k=config["num_experts_per_tok"],
        moe_comm_backend="standard",
    )
    for layer in layers:
        _as_in_transformers(layer.moe, config)
    return [layers[i] if has_experts(config, i) else dense[i] for i in range(len(layers))]


def _as_in_transformers(mixture: Any, config: Mapping[str, Any]) -> None:
    """Have torchtitan's mixture of a layer compute what transformers computes."""
    mixture.load_balance_coeff = None
    mixture.router = _as(ReplayRouter.Config, mixture.router)
    mixture.router.route_norm = bool(config.get("norm_topk_prob"))
    experts = mixture.routed_experts
    experts.inner_experts = _as(ExactExperts.Config, experts.inner_experts)


def set_routing(model: Any, routed_experts: torch.Tensor | None, counted: torch.Tensor) -> None:
    """Say how tokens are routed until this is called again; backward passes that compute anew included.

    Args:
        model: torchtitan's; nothing happens to one without experts.
        routed_experts: integer [B, L, layers with experts, K], to be forced; None: every router chooses itself.
        counted: bool [B, L], the tokens whose choices `take_load` tells.
    """
    for number, mixture in enumerate(_mixtures(model)):
        mixture.router.count()
        mixture.router.forced = None if routed_experts is None else routed_experts[:, :, number]
        mixture.router.counted = counted


def take_load(model: Any) -> torch.Tensor | None:
    """int64 [layers with experts, E]: how many counted tokens of this rank took each expert since the last call; None
    for a model without experts."""
    routers = [mixture.router for mixture in _mixtures(model)]
    if not routers:
        return None
    for router in routers:
        router.count()
    nothing = torch.zeros(routers[0].num_experts, dtype=torch.int64)
    taken = torch.stack([nothing if router.counts is None else router.counts.cpu() for router in routers])
    for router in routers:
        router.counts = None
    return taken


@dataclass(frozen=True, slots=True)
class OneExpert:
    """One expert's matrix inside a parameter that holds those of all experts."""

    stack: Any
    """DTensor [experts, rows, columns]."""
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the one matrix."""
        return tuple(self.stack.shape[1:])

    def box(self, local: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor | None:
        """What of the matrix lies in this rank's part of the stack; None when its experts are others.

        Args:
            local: the rank's part.
            offsets: where that begins in the stack.
        """
        at = self.index - offsets[0]
        return local[at] if 0 <= at < local.shape[0] else None


def named_parameters(model: Any, adapter: Any) -> list[tuple[str, Any]]:
    """(Hugging Face name, parameter or OneExpert) of all ranks' parameters, sorted: the same list on every rank."""
    state = model.state_dict()
    stacks = {name: value for name, value in state.items() if name.endswith(STACKED)}
    names = {theirs: ours for ours, theirs in adapter.from_hf_map.items() if theirs}
    named = list(adapter.to_hf({name: value for name, value in state.items() if name not in stacks}).items())
    for name, stack in stacks.items():
        _, layer, rest = name.split(".", 2)
        form = names["layers.{}." + rest]
        named += [(form.format(layer, index), OneExpert(stack, index)) for index in range(stack.shape[0])]
    return sorted(named, key=lambda item: item[0])


def full_weights(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor) in the order given; collective. The stacks of one layer are gathered at a time."""
    held: dict[int, torch.Tensor] = {}
    for name, parameter in named:
        if not isinstance(parameter, OneExpert):
            yield name, _whole(parameter.detach())
            continue
        if id(parameter.stack) not in held:
            if len(held) == len(STACKED):
                held.clear()
            held[id(parameter.stack)] = _whole(parameter.stack.detach())
        yield name, held[id(parameter.stack)][parameter.index]


def _mixtures(model: Any) -> list[Any]:
    return [layer.moe for layer in model.layers.values() if getattr(layer, "moe_enabled", False)]


def _as(kind: type, config: Any) -> Any:
    """The same fields as a Config of a subclass."""
    return kind(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init})


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
