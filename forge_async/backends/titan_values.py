"""The value head of PPO: a line from the final hidden state to a number, beside the model and never published."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer.utils import init_optim_state

from forge_async.learner.gae import gae, last_token_rewards
from forge_async.learner.loss import STD_EPSILON, Loss
from forge_async.learner.rows import Rows
from forge_async.learner.settings import OptimizerSettings
from forge_async.learner.vtrace import vtrace_targets


class ValueHead:
    """Copied on every rank; gradients are summed over the ranks that hold different samples.

    It starts at 0, so that the first advantages are the rewards. Its gradient flows into the model.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        optimizer: OptimizerSettings,
        loss: Loss,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Watch the final norm of `model`, whose output is the hidden state; `group` splits the batch."""
        self._weight = torch.zeros(model.norm.weight.shape[0], device=device, requires_grad=True)
        self._bias = torch.zeros((), device=device, requires_grad=True)
        self._max_grad_norm, self._objective, self._group = optimizer.max_grad_norm, loss.settings, group
        self._vtrace_rho_max = loss.vtrace_rho_max
        betas = (optimizer.beta1, optimizer.beta2)
        self._optimizer = torch.optim.AdamW([self._weight, self._bias], lr=optimizer.lr, betas=betas, weight_decay=0.0)
        self._device, self._hidden = device, None
        model.norm.register_forward_hook(self._keep)

    def values(self) -> torch.Tensor:
        """[B, L] float32: the values of the last forward pass, with its gradient; each pass is asked for once."""
        hidden, self._hidden = self._hidden, None
        assert hidden is not None, "no forward pass since the values were last asked for"
        return hidden.float() @ self._weight + self._bias

    def targets(
        self, batches: Sequence[Rows], before_step: Callable[[Rows], tuple[np.ndarray, np.ndarray]]
    ) -> list[dict[str, torch.Tensor]]:
        """Of each micro-batch the values before the step, and the advantages and returns that follow from them.

        Args:
            batches: their advantages are the rewards of the samples.
            before_step: values and log-probabilities of one of them, float32 [B, L] each; collective.
        """
        found = [self._estimates(rows, *before_step(rows)) for rows in batches]
        if self._objective.normalise_advantages:
            mean, std = self._moments(
                [each["advantages"][rows.mask > 0] for each, rows in zip(found, batches, strict=True)]
            )
            for each, rows in zip(found, batches, strict=True):
                normal = (each["advantages"] - mean) / (std + STD_EPSILON) * (rows.mask > 0)
                each["advantages"] = normal.astype(np.float32)
        return [{name: torch.from_numpy(each[name]).to(self._device) for name in each} for each in found]

    def step(self, lr: float) -> None:
        """One update by the gradients of this step, scaled down to `optimizer.max_grad_norm`."""
        parameters = [self._weight, self._bias]
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if self._group is not None:
                dist.all_reduce(gradient, group=self._group)
            parameter.grad = gradient
        if self._max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.drop()

    def state(self) -> dict[str, torch.Tensor]:
        """The head and what its optimiser remembers, by name; equal on every rank."""
        init_optim_state(self._optimizer)
        state = {"weight": self._weight.detach(), "bias": self._bias.detach()}
        for name, parameter in (("weight", self._weight), ("bias", self._bias)):
            state |= {f"{name}.{key}": tensor for key, tensor in self._optimizer.state[parameter].items()}
        return state

    def drop(self) -> None:
        """Forget the gradients of this step."""
        self._optimizer.zero_grad()

    def _estimates(self, rows: Rows, values: np.ndarray, logprobs: np.ndarray) -> dict[str, np.ndarray]:
        mask, segments, gamma = rows.mask, rows.segments, self._objective.gae_gamma
        rewards = last_token_rewards(rows.advantages, mask, segments)
        if self._vtrace_rho_max is None:
            lambda_ = self._objective.gae_lambda
            advantages, returns = gae(values, rewards, mask, segments, gamma=gamma, lambda_=lambda_)
        else:
            log_ratio, rho_max = logprobs - rows.behaviour_logprobs, self._vtrace_rho_max
            advantages, returns = vtrace_targets(
                values, rewards, log_ratio, mask, segments, gamma=gamma, rho_max=rho_max
            )
        return {"advantages": advantages, "returns": returns, "old_values": values}

    def _moments(self, advantages: Sequence[np.ndarray]) -> tuple[float, float]:
        """Mean and deviation over the tokens of the batch, all ranks."""
        flat = np.concatenate([*advantages, np.zeros(0, np.float32)]).astype(np.float64)
        sums = torch.tensor([len(flat), flat.sum(), (flat**2).sum()], dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)
        count, total, squares = sums.tolist()
        mean = total / max(count, 1)
        return mean, math.sqrt(max(squares / max(count, 1) - mean**2, 0.0))

    def _keep(self, _module: Any, _inputs: Any, hidden: torch.Tensor) -> None:
        self._hidden = hidden.full_tensor() if isinstance(hidden, DTensor) else hidden
