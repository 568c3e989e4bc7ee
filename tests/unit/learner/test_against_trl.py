"""TRL's own losses beside ours, where both define the same objective: value and gradient agree to 1e-6.

TRL is not part of the locked environment, so this is skipped by name without it; `pip install --no-deps trl==1.16.0`
suffices. TRL's loss is a method of its trainer; it is called with an object that has just the attributes it reads.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from forge_async.learner.loss import objective_loss
from forge_async.learner.settings import CorrectionSettings, ObjectiveSettings
from tests.unit.learner.micro import counts_of, random_inputs

LENGTH = 11


class Accelerator:
    """One process that is at the end of its gradient accumulation."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value):
        return value

    def reduce(self, value, reduction):
        return value


def trl_loss(inputs, **chosen):
    """TRL's loss of a batch of one sample a row."""
    trl = pytest.importorskip(
        "trl.trainer.grpo_trainer", reason="TRL is not installed: pip install --no-deps trl==1.16.0"
    )
    chosen = {"loss_type": "dapo", "level": "token", "delta": None, "beta": 0.0, "weights": None, "unbiased_kl": False,
              "entropy_coef": 0.0, "threshold": None, "low": 0.2, "high": 0.28} | chosen  # fmt: skip
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        args=SimpleNamespace(
            delta=chosen["delta"], use_bias_correction_kl=chosen["unbiased_kl"], steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=chosen["threshold"],
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        importance_sampling_level=chosen["level"],
        beta=chosen["beta"],
        loss_type=chosen["loss_type"],
        epsilon_low=chosen["low"],
        epsilon_high=chosen["high"],
        use_vllm=chosen["weights"] is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH,
        _entropy_bonus_enabled=chosen["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        entropy_coef=chosen["entropy_coef"],
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (inputs.logprobs, inputs.entropy, None),
    )
    old = inputs.logprobs.detach() if chosen["weights"] is not None else inputs.behaviour_logprobs
    ids = torch.zeros_like(inputs.segments)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": inputs.mask,
        "advantages": inputs.advantages, "old_per_token_logps": old, "ref_per_token_logps": inputs.reference_logprobs,
        "sampling_per_token_logps": inputs.behaviour_logprobs, "num_items_in_batch": inputs.mask.sum(),
        "importance_sampling_ratio": chosen["weights"],
    }  # fmt: skip
    return trl.GRPOTrainer._compute_loss(trainer, None, batch)


def batch():
    """Six samples, one a row, with the same advantage at each of a sample's tokens."""
    return random_inputs(num_rows=6, width=8, one_sample_a_row=True)


def truncated(inputs):
    return ((inputs.logprobs.detach() - inputs.behaviour_logprobs) * inputs.mask).exp().clamp(max=1.2)


@pytest.mark.parametrize(
    ("ours", "correction", "theirs"),
    [
        ({}, "token_is", {}),
        ({"name": "dapo", "dual_clip": 1.3}, "token_is", {"delta": 1.3}),
        ({"denominator": "sequence_means"}, "token_is", {"loss_type": "grpo"}),
        ({"name": "dr_grpo", "denominator": "constant"}, "token_is", {"loss_type": "dr_grpo"}),
        (
            {"name": "gspo", "denominator": "sequence_means", "clip_low": 0.01, "clip_high": 0.02},
            "token_is",
            {"loss_type": "grpo", "level": "sequence", "low": 0.01, "high": 0.02},
        ),
        ({"name": "cispo", "clip_low": 1.0, "clip_high": 0.3}, "token_is", {"loss_type": "cispo", "high": 1.3}),
        ({"kl_weight": 0.1}, "token_is", {"beta": 0.1}),
        ({"kl_weight": 0.1, "kl_kind": "k3_is"}, "token_is", {"beta": 0.1, "unbiased_kl": True}),
        ({"entropy_weight": 0.1}, "token_is", {"entropy_coef": 0.1}),
        ({}, "token_truncated", {"weights": truncated}),
        ({}, "off_policy_mask", {"threshold": 0.02}),
    ],
    ids=str,
)
def test_the_same_loss_and_gradient(ours, correction, theirs):
    one, other = batch(), batch()
    settings = ObjectiveSettings(constant_tokens=LENGTH, **ours)
    mine = objective_loss(settings, correction, CorrectionSettings(high=1.2, threshold=0.02))(one, counts_of(one)).loss
    found = trl_loss(other, **{key: value(other) if callable(value) else value for key, value in theirs.items()})
    mine.backward()
    found.backward()
    assert math.isclose(float(mine.detach()), float(found.detach()), rel_tol=1e-6)
    torch.testing.assert_close(one.logprobs.grad, other.logprobs.grad, rtol=1e-6, atol=1e-9)
    if settings.entropy_weight:
        torch.testing.assert_close(one.entropy.grad, other.entropy.grad, rtol=1e-6, atol=1e-9)
