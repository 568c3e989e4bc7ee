"""Settings of the model, the learner, its optimiser and its objective."""

from __future__ import annotations

from dataclasses import dataclass

from forge_async.core.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """Keys under `model`."""

    path: str = setting(
        "", "Hugging Face folder or hub name; empty: the tiny warm start of the task, made once and cached"
    )
    tiny: str = setting(
        "dense",
        "what the tiny warm start is, where model.path is empty; moe: a mixture of experts",
        choices=("dense", "moe"),
    )


ATTENTION_TOKENS = 4096
"""What `learner.attention_tokens` is when nobody says: about right for a model of width 512."""
MASK_ENTRIES = 1 << 22
"""On a CPU, entries of a mask, rows x width x width, up to which one call attends in all rows: faster while samples are
short; a row of 2,048 tokens is the widest. Wider rows are attended part by part, with masks of this size at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """Keys under `learner`."""

    ranks: int = setting(1, "learner processes; parameters are sharded over them (FSDP2)", low=1)
    tensor_parallel: int = setting(1, "ranks of a tensor-parallel group; divides learner.ranks", low=1)
    expert_parallel: int = setting(1, "ranks over which experts are spread; divides learner.ranks", low=1)
    threads: int = setting(1, "threads that each rank computes with on a CPU", low=1)
    dtype: str = setting("float32", "dtype of the forward and backward pass", choices=("float32", "bfloat16"))
    row_tokens: int = setting(64, "tokens of a packed row; grows to the longest sample", unit="tokens", low=8)
    micro_batch_tokens: int = setting(2048, "tokens of one forward and backward pass on a rank", unit="tokens", low=8)
    packed: bool = setting(True, "whether samples share rows; false pads each to the longest of its micro-batch")
    share_prompts: bool = setting(
        True,
        "compute the prompt that samples begin with once for those that share a row; gradients stay the same",
    )
    attention_tokens: int = setting(
        ATTENTION_TOKENS,
        "length of a sample at which attention costs as much as the rest, about 8 times the model's width; ranks and "
        "micro-batches are balanced by it",
        unit="tokens",
        low=1,
    )
    logit_chunk_tokens: int = setting(
        2048,
        "tokens whose logits are held at a time; a micro-batch of more is cut, and the logits are made twice",
        unit="tokens",
        low=1,
    )
    max_sample_tokens: int = setting(
        0, "longest sample that is trained on, prompt included; 0: no limit", unit="tokens", low=0
    )
    oversize: str = setting(
        "refuse",
        "what becomes of a longer sample, before its group is admitted to a batch. refuse: the group is filtered "
        "(oversize); truncate: its first tokens are trained on; turns: its first turns that fit whole. Where nothing "
        "sampled would be left of a sample, its group is refused",
        choices=("refuse", "truncate", "turns"),
    )
    updates_per_batch: int = setting(
        1,
        "optimiser steps on each batch, or on its mini-batches in turn; every one after the first adds a step to the "
        "samples' age",
        low=1,
    )
    mini_batches: int = setting(
        1,
        "parts that a batch is cut into, by groups, each for updates of its own; updates_per_batch, a multiple of it, "
        "says how many updates there are: 4 of 4 parts go through the batch once, 8 twice",
        low=1,
    )
    activation_checkpointing: str = setting(
        "none", "recompute activations in the backward pass", choices=("none", "selective", "full")
    )
    compile: bool = setting(False, "compile the model; slower to start, and `bench compile` says when it pays")


LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that an adapter may be laid on, as Hugging Face names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Keys under `learner.lora`: low-rank adapters (LoRA; Hu et al., 2021, arXiv 2106.09685) on a frozen model."""

    rank: int = setting(0, "rank of the adapters that are trained in place of the model; 0: the model", low=0, high=512)
    alpha: float = setting(16.0, "what an adapter adds is scaled by alpha / rank", low=0.0)
    targets: list[str] = setting(
        ["q_proj", "k_proj", "v_proj", "o_proj"],
        "the layers with an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj",
    )

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Keys under `optimizer` (AdamW)."""

    lr: float = setting(6e-4, "learning rate after warm-up", low=0.0)
    warmup_steps: int = setting(20, "steps of linear warm-up", unit="steps", low=0)
    decay: str = setting("linear", "what follows the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_factor: float = setting(0.1, "share of lr that a decay ends at", low=0.0, high=1.0)
    beta1: float = setting(0.9, "first moment's decay", low=0.0, high=1.0)
    beta2: float = setting(0.95, "second moment's decay", low=0.0, high=1.0)
    weight_decay: float = setting(0.0, "decoupled weight decay", low=0.0)
    max_grad_norm: float = setting(1.0, "gradients are scaled down to this norm", low=0.0)


OBJECTIVES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
"""The words of `objective.name`; a colon in it makes it a reference to a function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """Keys under `objective`. `objective.name` sets those that it needs otherwise; docs/objectives.md has the table."""

    name: str = setting(
        "grpo",
        "the objective: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_pp or ppo, or a function of your own as "
        "file.py:function or package.module:function; sets the keys that it needs",
    )
    weight: float = setting(1.0, "the objective's weight in the loss; 0 leaves the other terms alone", low=0.0)
    denominator: str = setting(
        "tokens",
        "what the objective's sum over tokens is divided by. tokens: those of the batch; sequence_means: each sample's "
        "sum by its length, then samples; sequences: samples; constant: samples times objective.constant_tokens",
        choices=("tokens", "sequence_means", "sequences", "constant"),
    )
    constant_tokens: int = setting(
        0, "length that denominator=constant divides by; 0: sampling.max_new_tokens", unit="tokens", low=0
    )
    clip_low: float = setting(0.2, "the ratio is clipped below 1 - clip_low", low=0.0, high=1.0)
    clip_high: float = setting(0.28, "the ratio is clipped above 1 + clip_high", low=0.0)
    normalise_advantages: bool = setting(
        False, "centre and scale the advantages over the tokens of the whole batch (REINFORCE++)"
    )
    dual_clip: float = setting(
        0.0, "the loss of a negative advantage is at most this many times its size; 0: no such bound", low=0.0
    )
    kl_weight: float = setting(
        0.0, "weight of the divergence from the reference, the initial model (reference.placement)", low=0.0
    )
    kl_kind: str = setting(
        "k3",
        "estimate of the divergence from one sample a token; k3_is weighs k3 by the ratio, for old samples",
        choices=("k1", "k2", "k3", "k3_is"),
    )
    kl_place: str = setting("loss", "where the divergence counts", choices=("loss", "reward"))
    entropy_weight: float = setting(0.0, "weight of the entropy bonus", low=0.0)
    entropy_metric: bool = setting(False, "record the entropy though its weight is 0; costs a pass over the logits")
    teacher: str = setting("", "Hugging Face folder of a teacher with the same tokenizer, to distil from; empty: none")
    teacher_weight: float = setting(1.0, "weight of the divergence from the teacher, if there is one", low=0.0)

    value_weight: float = setting(0.5, "ppo: weight of the value head's squared error", low=0.0)
    value_clip: float = setting(0.2, "ppo: a value moves at most so far from its prediction; 0: freely", low=0.0)
    gae_gamma: float = setting(
        1.0, "ppo: discount of a token; with async.correction=vtrace, of a turn", low=0.0, high=1.0
    )
    gae_lambda: float = setting(
        0.95, "ppo: how far rewards reach back beside values; not with async.correction=vtrace", low=0.0, high=1.0
    )

    @property
    def has_values(self) -> bool:
        """Whether the objective learns a value head."""
        return self.name == "ppo"

    @property
    def trains_zero_advantages(self) -> bool:
        """Whether tokens whose advantage is 0 have a gradient all the same; of a user's function nobody can say."""
        others = self.kl_weight or self.entropy_weight or self.teacher or self.normalise_advantages
        return bool(others) or self.has_values or ":" in self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSettings:
    """Keys under `reference`: of the models that are only read, the reference and the teacher."""

    placement: str = setting(
        "learner",
        "where they are. learner: on its mesh, sharded like its model; service: in processes of their own, which score "
        "samples before the learner takes them",
        choices=("learner", "service"),
    )
    ranks: int = setting(1, "placement=service: its processes; parameters are sharded over them (FSDP2)", low=1)
    timeout_s: float = setting(
        120.0, "placement=service: longest time that it may take for the groups that ended together", unit="s", low=0.1
    )

    @property
    def is_service(self) -> bool:
        """Whether they are in processes of their own."""
        return self.placement == "service"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Keys under `correction`. `async.correction` sets those that it needs otherwise."""

    high: float = setting(2.0, "weights are truncated at, or masked above, this importance ratio", low=1.0)
    low: float = setting(0.5, "weights are masked below this importance ratio", low=0.0, high=1.0)
    threshold: float = setting(
        0.01, "off_policy_mask: mean log-ratio of a sample above which it is left out", unit="nats", low=0.0
    )
    age_decay: float = setting(
        1.0, "a token's weight is multiplied by this for each step of its age; 1: not at all", low=0.0, high=1.0
    )
