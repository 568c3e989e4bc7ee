"""What a learner needs to go on where it was: parameters, optimiser, value head, in torch's distributed checkpoint.

What training does not change is not in it: frozen parameters come from the model's folder again, and a checksum says
whether they are the same ones. Each rank writes its own shards and reads those that it needs, so that a learner may go
on with another number of ranks. Learning rate and the other settings of the optimiser are not kept: they are the
configuration's.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, init_optim_state

from forge_async.core.errors import LearnerError

Tensors = Mapping[str, torch.Tensor]
OPTIMIZER = "optimizer."
FROZEN = "frozen."
OPTIONAL = ("values.",)
"""Beginnings of names that a checkpoint may lack: the value head of a run that trained without one until now."""


def collect(model: torch.nn.Module, optimizers: Any, values: Tensors, frozen: Tensors) -> dict[str, torch.Tensor]:
    """The tensors themselves, by name: to write them, or to have a checkpoint read into them.

    Args:
        model: its lasting buffers, and those of its parameters that are trained.
        optimizers: torchtitan's container; state that no step has made yet is made.
        values: the value head's, with its optimiser's; empty without one.
        frozen: what tells whether two models have the same frozen parameters; empty where none is frozen.
    """
    held = model.state_dict(keep_vars=True).items()
    found: dict[str, torch.Tensor] = {f"model.{name}": each.detach() for name, each in held if not _is_frozen(each)}
    for optimizer in optimizers:
        found |= {f"{OPTIMIZER}{name}": tensor for name, tensor in optimizer_tensors(optimizer).items()}
    found |= {f"{FROZEN}{name}": tensor for name, tensor in frozen.items()}
    return found | {f"values.{name}": tensor for name, tensor in values.items()}


def _is_frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What an optimiser remembers of each parameter, by name."""
    init_optim_state(optimizer)
    flat = get_flat_optim_state_dict(optimizer)
    return {
        name: value for name, value in flat.items() if isinstance(value, torch.Tensor) and name.startswith("state.")
    }


def save(folder: Path, tensors: Tensors) -> None:
    """Write a checkpoint. Collective."""
    with _quiet():
        dcp.save(dict(tensors), checkpoint_id=folder, no_dist=not dist.is_initialized())


def load(folder: Path, tensors: Tensors) -> None:
    """Read a checkpoint into `tensors`, whatever ranks wrote it. Collective.

    Raises LearnerError when it cannot be read, or lacks or shapes otherwise what this learner needs, or when it was
    trained on other frozen parameters.
    """
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(FROZEN)}
    wanted = {name: tensor.clone() if name in own else tensor for name, tensor in tensors.items()}
    try:
        with _quiet():
            known = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
            for beginning in OPTIONAL:
                if not any(name.startswith(beginning) for name in known):
                    wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith(beginning)}
            _check(folder, wanted, known)
            dcp.load(wanted, checkpoint_id=folder, no_dist=not dist.is_initialized())
        if any(not torch.equal(wanted[name], tensor) for name, tensor in own.items()):
            raise LearnerError(
                f"The adapters in {folder} were trained on other weights than those that model.path has now; give the "
                "model that the run began with."
            )
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, CheckpointException) as error:
        raise LearnerError(
            f"The checkpoint in {folder} cannot be read ({type(error).__name__}: {error}); "
            "delete its folder to go on from the one before."
        ) from error


def go_on_from(schedules: Any, step: int) -> None:
    """Set the learning rate to what the schedule says after `step` steps."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To get the last learning rate computed by the scheduler")
        schedules.load_state_dict({"last_epoch": step})
    for schedule in schedules:
        for group, lr in zip(schedule.optimizer.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = lr


def _check(folder: Path, wanted: Tensors, known: Mapping[str, Any]) -> None:
    for name, tensor in wanted.items():
        size = getattr(known.get(name), "size", None)
        if size is None or tuple(size) != tuple(tensor.shape):
            has = "does not have it" if size is None else f"has it as {tuple(size)}"
            raise LearnerError(
                f"The run cannot go on with another model or optimiser: {name} is {tuple(tensor.shape)} here, and the "
                f"checkpoint in {folder} {has}; resume with the settings of the run's config.yaml."
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks about running on one rank, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled, unavailable or uninitialized.*")
        yield
