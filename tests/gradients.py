"""Gradients of a torchtitan learner's steps, before they are clipped; called inside a `Child`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from forge_async.core.versions import PolicyVersion
from forge_async.learner.batch import Share
from tests import backends


def gradients(folder: str, port: int, *, double: bool = False, objective: dict[str, Any], **settings: Any) -> Gradients:
    """A learner for `Gradients`, with all that `objective` needs beside the model.

    Args:
        double: compute in float64; the samples, and what PPO makes of them before the step, stay in float32.
        settings: of `backends.titan_learner`.
    """
    with _in_float64() if double else contextlib.nullcontext():
        return Gradients(backends.titan_learner(folder, port, objective=objective, **settings), double=double)


class Gradients:
    """A learner whose steps end with the gradient: weights and version stay as they are."""

    def __init__(self, learner: Any, *, double: bool) -> None:
        import torch

        self._learner, self._double, self._found = learner, double, None
        self._values, head = learner._values, learner._values._weight
        with torch.no_grad():  # away from 0, so that the error of the values flows into the model
            head.copy_(0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(0)))
        if double:
            self._values._weight = head.detach().double().requires_grad_()
            self._values._bias = self._values._bias.detach().double().requires_grad_()
        learner._apply_gradients, learner._last_lr = self._record, 0.0

    def score(self, token_ids: Any) -> Any:
        """As a learner's."""
        return self._learner.score(token_ids)

    def of(self, objective: dict[str, Any], correction: str, share: Share, logit_chunk_tokens: int = 2048) -> Any:
        """Loss, and gradient of all parameters and of the value head, float64 [number of elements].

        Of all ranks' samples, equal on every rank. The learner is two versions younger than the samples.
        """
        from forge_async.learner.loss import objective_loss
        from forge_async.learner.settings import ObjectiveSettings

        learner = self._learner
        learner.version = PolicyVersion(step=2)
        learner._loss = objective_loss(ObjectiveSettings(**objective), correction)
        learner._wanted = replace(learner._wanted, chunk_tokens=logit_chunk_tokens)
        learner._values = self._values if learner._loss.needs_values else None
        if learner._values:
            learner._values._objective = learner._loss.settings
            learner._values._vtrace_rho_max = learner._loss.vtrace_rho_max
        with _in_float64() if self._double else contextlib.nullcontext():
            result = learner.train(share)
        return result.loss, self._found

    def _record(self, *_: Any) -> float:
        import torch

        from forge_async.learner.token_scores import whole

        learner = self._learner
        found = [whole(each.grad) for each in learner._model.parameters()]
        if learner._values:
            own = [self._values._weight.grad, self._values._bias.grad]
            if self._values._group is not None:
                for each in own:
                    torch.distributed.all_reduce(each, group=self._values._group)
            found += own
        self._found = torch.cat([each.double().flatten() for each in found])
        learner._optimizer.zero_grad()
        self._values._weight.grad = self._values._bias.grad = None
        return float(self._found.norm())


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """What torchtitan and our code ask for as float32 is float64."""
    from forge_async.backends import titan_cpu  # noqa: F401  before torchtitan

    # isort: split
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP

    narrow, to_narrow = TORCH_DTYPE_MAP["float32"], torch.Tensor.float
    TORCH_DTYPE_MAP["float32"], torch.Tensor.float = torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        TORCH_DTYPE_MAP["float32"], torch.Tensor.float = narrow, to_narrow
