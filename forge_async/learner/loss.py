"""The loss of a step: a weighted sum of components, each with its own denominator over the whole batch.

Every micro-batch of every rank gives its part of each sum; the denominators count the whole batch, so that how samples
are laid out over rows, micro-batches and ranks changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forge_async.core.errors import ConfigError
from forge_async.learner import segments
from forge_async.learner.corrections import WITHOUT_START, correction
from forge_async.learner.corrections.anchors import none
from forge_async.learner.counts import Counts
from forge_async.learner.inputs import LossInputs
from forge_async.learner.objectives import Objective, cross_entropy, objective
from forge_async.learner.objectives.distillation import distillation
from forge_async.learner.objectives.entropy import entropy_bonus
from forge_async.learner.objectives.kl import kl_estimate, kl_loss, with_kl_in_reward
from forge_async.learner.objectives.ppo import value_loss
from forge_async.learner.settings import CorrectionSettings, ObjectiveSettings

if TYPE_CHECKING:
    import torch


STD_EPSILON = 1e-8
"""Added to the batch's deviation, so that a batch of equal advantages gives 0, not nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One addend of the loss."""

    name: str
    weight: float
    denominator: str
    """As `objective.denominator`."""
    function: Objective
    corrected: bool = True
    """Whether the correction's weights apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """One micro-batch's part of a step."""

    loss: torch.Tensor
    """Scalar with gradient: its part of the batch's loss, denominators included."""
    token_losses: torch.Tensor
    """[B, L] without gradient: of each token in the mask, weighted, before denominators; to find the one to blame."""
    sums: dict[str, torch.Tensor]
    """Scalars without gradient, to be added up over micro-batches and ranks; the same names in each."""
    maxima: dict[str, torch.Tensor]
    """Scalars without gradient of which the largest counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a step minimises; called with each micro-batch."""

    components: Sequence[Component]
    settings: ObjectiveSettings
    correct: Callable[[LossInputs], LossInputs]
    """Sets anchor and weights."""
    compares: bool = True
    """Whether the sampler's log-probabilities mean something; False for demonstrations."""
    needs_start: bool = False
    """Whether later updates of a batch want `start_logprobs`."""
    vtrace_rho_max: float | None = None
    """Where advantages and returns come from values by V-trace, where a turn's ratio is truncated; None: by GAE."""

    @property
    def needs_reference(self) -> bool:
        """Whether `reference_logprobs` are wanted."""
        return self.settings.kl_weight > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` is wanted."""
        return self.settings.entropy_weight > 0 or self.settings.entropy_metric

    @property
    def needs_values(self) -> bool:
        """Whether `values`, `old_values` and `returns` are wanted."""
        return self.compares and self.settings.has_values

    def __call__(self, inputs: LossInputs, counts: Counts) -> LossTerms:
        """Compute the micro-batch's part; `inputs` come with any anchor and without weights."""
        if self.settings.normalise_advantages and not self.needs_values:
            inputs = replace(inputs, advantages=normalised(inputs, counts))
        if self.needs_reference and self.settings.kl_place == "reward":
            inputs = with_kl_in_reward(inputs, self.settings)
        inputs = self.correct(inputs)  # last, since a correction may look at the advantages
        parts, token_losses, clipped, own = {}, [], None, {}
        for component in self.components:
            found = component.function(inputs, self.settings)
            token_loss = found.loss
            if component.corrected and inputs.weights is not None:
                token_loss = token_loss * inputs.weights
            token_losses.append(component.weight * token_loss.detach() * inputs.mask)
            parts[component.name] = component.weight * self._reduced(token_loss, component.denominator, inputs, counts)
            clipped = found.clipped if component is self.components[0] else clipped
            own |= {f"objective/{name}": (each.detach() * inputs.mask).sum() for name, each in found.figures.items()}
        sums, maxima = self._figures(inputs, clipped)
        sums |= own | {f"loss/{name}": part.detach() for name, part in parts.items()}
        return LossTerms(loss=_add(list(parts.values())), token_losses=_add(token_losses), sums=sums, maxima=maxima)

    def _reduced(self, loss: torch.Tensor, denominator: str, inputs: LossInputs, counts: Counts) -> torch.Tensor:
        masked = loss * inputs.mask
        if denominator == "tokens":
            return masked.sum() / max(counts.num_loss_tokens, 1)
        if denominator == "sequence_means":
            return (masked / segments.lengths(inputs)).sum() / max(counts.num_samples, 1)
        if denominator == "sequences":
            return masked.sum() / max(counts.num_samples, 1)
        return masked.sum() / max(counts.num_batch_samples * self.settings.constant_tokens, 1)

    def _figures(
        self, inputs: LossInputs, clipped: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Sums and maxima over the tokens in the mask, for `learner.figures`."""
        mask, logprobs = inputs.mask, inputs.logprobs.detach()
        zero = logprobs.new_zeros(())
        sums = {"clipped": zero if clipped is None else (clipped * mask).sum(), "mismatch_kl": zero}
        maxima = {"logprob_diff": zero}
        if self.compares:
            difference = (logprobs - inputs.behaviour_logprobs) * mask
            fresh = segments.fresh(inputs)
            kl = difference.exp() - 1 - difference  # 0 where the mask is
            ratio = ((logprobs - inputs.anchor_logprobs) * mask).exp()
            weight = (ratio if inputs.weights is None else ratio * inputs.weights) * mask
            sums |= {
                "mismatch_kl": kl.sum(),
                "fresh_kl": (kl * fresh).sum(),
                "fresh_tokens": fresh.sum(),
                "weight": weight.sum(),
                "weight_squared": weight.square().sum(),
                "masked": zero if inputs.weights is None else ((inputs.weights == 0) * mask).sum(),
            }
            maxima = {
                "logprob_diff": difference.abs().max(),
                "fresh_logprob_diff": (difference.abs() * fresh).max(),
                "weight": weight.max(),
            }
        if inputs.entropy is not None:
            sums["entropy"] = (inputs.entropy.detach() * mask).sum()
        for name, other in (("reference_kl", inputs.reference_logprobs), ("teacher_kl", inputs.teacher_logprobs)):
            if other is not None:
                sums[name] = (kl_estimate(logprobs, other, "k3") * mask).sum()
        if inputs.returns is not None and inputs.old_values is not None:
            sums["value_error"] = ((inputs.returns - inputs.old_values).square() * mask).sum()
            sums["return"] = (inputs.returns * mask).sum()
            sums["return_squared"] = (inputs.returns.square() * mask).sum()
        return sums, maxima


def normalised(inputs: LossInputs, counts: Counts) -> torch.Tensor:
    """[B, L]: advantages less their mean, over their deviation, over the tokens of the batch (REINFORCE++)."""
    centred = inputs.advantages - counts.advantage_mean
    return centred / (counts.advantage_std + STD_EPSILON) * inputs.mask


def objective_loss(
    settings: ObjectiveSettings, correction_name: str, correction_settings: CorrectionSettings | None = None
) -> Loss:
    """The loss that the settings name; `correction_name` is `async.correction`.

    Raises ConfigError for an objective or a correction that does not exist.
    """
    if settings.denominator == "constant" and settings.constant_tokens < 1:
        raise ConfigError("objective.denominator=constant needs objective.constant_tokens, such as the length limit.")
    numbers = correction_settings or CorrectionSettings()
    by_vtrace = settings.has_values and correction_name == "vtrace"  # the advantages then hold the ratios
    components = [
        Component(
            name="objective",
            weight=settings.weight,
            denominator=settings.denominator,
            function=objective(settings.name),
        )
    ]
    if settings.kl_weight > 0 and settings.kl_place == "loss":
        is_weighted = settings.kl_kind.endswith("_is")
        components.append(_regulariser("kl", settings.kl_weight, kl_loss, corrected=is_weighted))
    if settings.entropy_weight > 0:
        components.append(_regulariser("entropy", settings.entropy_weight, entropy_bonus, corrected=False))
    if settings.teacher:
        components.append(_regulariser("teacher", settings.teacher_weight, distillation, corrected=True))
    if settings.has_values:
        components.append(_regulariser("value", settings.value_weight, value_loss, corrected=False))
    return Loss(
        components=components,
        settings=settings,
        correct=correction("none" if by_vtrace else correction_name, numbers),
        vtrace_rho_max=numbers.high if by_vtrace else None,
        needs_start=correction_name not in WITHOUT_START
        or ":" in settings.name
        or (settings.kl_weight > 0 and settings.kl_place == "reward"),
    )


def supervised_loss() -> Loss:
    """Cross-entropy on demonstrations: the mean over the tokens in the mask of -log pi."""
    part = Component(name="objective", weight=1.0, denominator="tokens", function=cross_entropy)
    plain = CorrectionSettings()
    return Loss(
        components=[part], settings=ObjectiveSettings(), correct=lambda inputs: none(inputs, plain), compares=False
    )


def _regulariser(name: str, weight: float, function: Objective, *, corrected: bool) -> Component:
    return Component(name=name, weight=weight, denominator="tokens", function=function, corrected=corrected)


def _add(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
