"""Combinations that cannot run, each refused in one sentence that names the keys, their values and the remedy.

`check` raises the first; `problems` yields all. What lies on disk is looked at in `checks_disk.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from forge_async.config.checks_disk import DISK_CHECKS
from forge_async.config.checks_job import JOB_CHECKS
from forge_async.config.checks_policy import POLICY_CHECKS, round_up
from forge_async.config.presets import PRESETS
from forge_async.config.schema import Config
from forge_async.core.errors import ConfigError
from forge_async.learner.settings import LORA_TARGETS, MASK_ENTRIES, OBJECTIVES
from forge_async.replay.lanes import Lanes


def check(config: Config) -> None:
    """Raise ConfigError with the first problem of `config`, which is whole and within its ranges."""
    for problem in problems(config):
        raise ConfigError(problem)


def problems(config: Config) -> Iterator[str]:
    """Yield a sentence for everything that keeps `config` from running: impossible, or not on disk."""
    for test in (*CHECKS, *DISK_CHECKS):
        try:
            problem = test(config)
        except OSError as error:  # a name too long, a folder that may not be looked into
            problem = f"{error.filename} cannot be reached ({error.strerror}); give another path."
        if problem:
            yield problem


def preset_is_kept(config: Config) -> str | None:
    """`async.buffer` and a dial that it sets say the same."""
    for key, value in PRESETS.get(config.asynchrony.buffer, {}).items():
        given = config.value(key)
        if given != value:
            buffer = config.asynchrony.buffer
            return f"{key}={given} contradicts async.buffer={buffer}, which sets it to {value}; leave one of them out."
    return None


def age_is_corrected(config: Config) -> str | None:
    """Old samples need importance weights."""
    dials = config.asynchrony
    if dials.highest_staleness != 0 and dials.correction == "none" and not dials.force_uncorrected:
        return (
            f"async.correction=none with async.max_staleness={dials.max_staleness} would train on old samples as if "
            "they were new; use async.correction=token_is, async.max_staleness=0 or async.force_uncorrected=true."
        )
    return None


def objective_is_known(config: Config) -> str | None:
    """`objective.name` is one of ours, or a reference, which has a colon."""
    name = config.objective.name
    if name in OBJECTIVES or ":" in name:
        return None
    near = difflib.get_close_matches(name, OBJECTIVES, n=1)
    meant = f"did you mean objective.name={near[0]}?" if near else f"use one of {', '.join(OBJECTIVES)}."
    return f"objective.name={name} is no objective, nor a function as file.py:function; {meant}"


def loss_has_a_term(config: Config) -> str | None:
    """Something must be minimised."""
    objective = config.objective
    if objective.weight == 0 and not (objective.kl_weight or objective.entropy_weight or objective.teacher):
        return "objective.weight=0 leaves nothing to minimise; give objective.teacher, or a weight above 0."
    return None


def updates_go_round(config: Config) -> str | None:
    """Updates go through the mini-batches in turn, each pass to its end."""
    updates, parts = config.learner.updates_per_batch, config.learner.mini_batches
    if updates % parts:
        return (
            f"learner.updates_per_batch={updates} is no multiple of learner.mini_batches={parts}; "
            f"use learner.updates_per_batch={round_up(updates, parts)}."
        )
    if parts > config.root.groups_per_step:
        return (
            f"learner.mini_batches={parts} is more than groups_per_step={config.root.groups_per_step}, and no group "
            f"is divided; use learner.mini_batches={config.root.groups_per_step} or fewer."
        )
    return None


def divergence_teaches(config: Config) -> str | None:
    """k1 has no gradient as a loss, and a reward needs no importance weight."""
    objective = config.objective
    if objective.kl_weight == 0:
        return None
    if objective.kl_place == "loss" and objective.kl_kind == "k1":
        return "objective.kl_kind=k1 has a gradient of 0 on average with objective.kl_place=loss; use k2, k3 or k3_is."
    if objective.kl_place == "reward" and objective.kl_kind == "k3_is":
        return "objective.kl_kind=k3_is is for objective.kl_place=loss; with objective.kl_place=reward use k1 or k3."
    return None


def service_has_models(config: Config) -> str | None:
    """A reference service is started for something."""
    objective = config.objective
    if config.reference.is_service and not (objective.kl_weight or objective.teacher):
        return (
            "reference.placement=service has no model to serve: objective.kl_weight=0 wants no reference, and "
            "objective.teacher is empty; give one of them, or reference.placement=learner."
        )
    return None


def service_hang_is_named(config: Config) -> str | None:
    """A reference service that hangs is to end the run by name, before its groups are lost for their own deadline."""
    service_s, group_s = config.reference.timeout_s, config.rollout.group_timeout_s
    if config.reference.is_service and service_s >= group_s:
        return (
            f"reference.timeout_s={service_s:g} is not below rollout.group_timeout_s={group_s:g}, so that a service "
            f"that hangs would only lose groups; use reference.timeout_s={group_s / 2:g} or so."
        )
    return None


def values_get_rewards(config: Config) -> str | None:
    """A value head predicts rewards, so nothing else may have been subtracted from them or divided out."""
    objective, advantage = config.objective, config.advantage
    if not objective.has_values:
        return None
    for key, value in (("baseline", advantage.baseline), ("scale", advantage.scale)):
        if value != "none":
            return (
                f"objective.name=ppo learns its own baseline, so advantage.{key}={value} must be advantage.{key}=none."
            )
    if objective.kl_weight and objective.kl_place == "reward":
        return "objective.name=ppo has no place for objective.kl_place=reward; use objective.kl_place=loss."
    return None


def overlong_fits(config: Config) -> str | None:
    """The last tokens before the limit are at most all of them."""
    over, limit = config.advantage.overlong_tokens, config.sampling.max_new_tokens
    if over > limit:
        return (
            f"advantage.overlong_tokens={over} is more than sampling.max_new_tokens={limit}; "
            f"use advantage.overlong_tokens={limit} or less."
        )
    return None


def dials_agree(config: Config) -> str | None:
    """Staleness, window, order, publication and buffer leave room for a batch, by the replay room's own arithmetic."""
    try:
        Lanes.of(config.asynchrony, config.root.groups_per_step)
    except ConfigError as error:
        return str(error)
    return None


def adapters_have_places(config: Config) -> str | None:
    """`learner.lora.targets` names layers, each once."""
    targets = config.lora.targets
    for name in targets:
        if name not in LORA_TARGETS:
            near = difflib.get_close_matches(name, LORA_TARGETS, n=1)
            meant = f"did you mean {near[0]}?" if near else f"use some of {', '.join(LORA_TARGETS)}."
            return f"learner.lora.targets={targets} has {name}, which is no layer that takes an adapter; {meant}"
    if config.lora.rank and (not targets or len(set(targets)) < len(targets)):
        return f"learner.lora.targets={targets} must name at least one layer, and each once; use [q_proj,v_proj] or so."
    return None


def parallel_divides(config: Config) -> str | None:
    """Tensor and expert groups are cut out of the learner's ranks."""
    learner = config.learner
    for key, size in (("tensor", learner.tensor_parallel), ("expert", learner.expert_parallel)):
        if learner.ranks % size:
            return (
                f"learner.{key}_parallel={size} does not divide learner.ranks={learner.ranks}; "
                f"make learner.ranks a multiple of {size}."
            )
    return None


def tiny_model_is_made(config: Config) -> str | None:
    """What the tiny model is matters only where one is made."""
    path, tiny = config.model.path, config.model.tiny
    if path and tiny != "dense":
        return f"model.tiny={tiny} is for the warm start, and model.path={path} is given; leave one of them out."
    return None


def batch_divides(config: Config) -> str | None:
    """Every data-parallel rank takes the same number of groups."""
    groups, ranks = config.root.groups_per_step, config.learner.ranks // config.learner.tensor_parallel
    if ranks and groups % ranks:
        return (
            f"groups_per_step={groups} cannot be shared equally by learner.ranks={config.learner.ranks}; "
            f"use a multiple of {ranks}, such as groups_per_step={round_up(groups, ranks)}."
        )
    return None


def group_has_baseline(config: Config) -> str | None:
    """An advantage is the reward minus the group's mean, which is 0 for a group of one."""
    if config.root.group_size == 1 and config.advantage.baseline != "none":
        return (
            f"group_size=1 leaves advantage.scale={config.advantage.scale} nothing to compare a rollout with, "
            "so that every advantage is 0; use group_size=2 or more."
        )
    return None


def row_fits(config: Config) -> str | None:
    """A micro-batch holds at least one packed row."""
    row, batch = config.learner.row_tokens, config.learner.micro_batch_tokens
    if row > batch:
        return (
            f"learner.row_tokens={row} is above learner.micro_batch_tokens={batch}, which holds whole rows; "
            f"use learner.micro_batch_tokens={row} or more."
        )
    return None


def compiled_rows_fit(config: Config) -> str | None:
    """On a CPU, rows that are attended part by part would be compiled anew for each way that they are laid out."""
    learner = config.learner
    width = max(learner.row_tokens, config.policy.max_model_tokens)
    if (
        learner.compile
        and not config.job.gpus_per_host
        and max(learner.micro_batch_tokens, width) * width > MASK_ENTRIES
    ):
        return (
            f"learner.compile=true on a CPU: {width} tokens of a row (learner.row_tokens, policy.max_model_tokens) "
            f"times learner.micro_batch_tokens={learner.micro_batch_tokens} is above {MASK_ENTRIES}, so they would be "
            "compiled anew for each way that they are laid out; lower one of them, or use learner.compile=false."
        )
    return None


def held_out_exists(config: Config) -> str | None:
    """An evaluation needs prompts that training does not see."""
    prompts = config.eval.num_prompts
    if prompts and config.task.held_out_fraction == 0:
        return (
            f"eval.num_prompts={prompts} with task.held_out_fraction=0 leaves no prompts to evaluate on; "
            "use task.held_out_fraction=0.1 or so, or eval.num_prompts=0."
        )
    return None


def passes_are_drawn(config: Config) -> str | None:
    """pass@k needs k samples of each prompt."""
    evaluation = config.eval
    if any(k < 1 for k in evaluation.k):
        return f"eval.k={evaluation.k} must be whole numbers of 1 or more."
    most = max(evaluation.k, default=1)
    if most > evaluation.samples:
        return f"eval.k={evaluation.k} asks for more than eval.samples={evaluation.samples}; use eval.samples={most}."
    return None


def end_is_chosen(config: Config) -> str | None:
    """A run directory is continued or deleted, not both."""
    if config.run.resume and config.run.overwrite:
        return "run.resume=true and run.overwrite=true contradict each other; leave one of them out."
    return None


CHECKS: tuple[Callable[[Config], str | None], ...] = (
    preset_is_kept,
    age_is_corrected,
    dials_agree,
    objective_is_known,
    loss_has_a_term,
    updates_go_round,
    divergence_teaches,
    service_has_models,
    service_hang_is_named,
    values_get_rewards,
    overlong_fits,
    adapters_have_places,
    parallel_divides,
    tiny_model_is_made,
    batch_divides,
    group_has_baseline,
    row_fits,
    compiled_rows_fit,
    held_out_exists,
    passes_are_drawn,
    *POLICY_CHECKS,
    *JOB_CHECKS,
    end_is_chosen,
)
"""Checks of combinations, in the order in which they are told."""
