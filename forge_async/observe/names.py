"""The names of a metrics row: one place for name, unit and meaning.

A name's prefix is the room it speaks of. The names marked as always present are a promise to whoever reads
`metrics.jsonl`; the others appear where they mean something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge_async.core.errors import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """What a name of `metrics.jsonl` means."""

    name: str
    unit: str
    """Unit of the number; "" for a plain number."""
    meaning: str
    """One line for people."""
    required: bool
    """True when every row has it."""


METRICS: dict[str, Metric] = {}
"""All names, in the order of the reference."""


def _always(name: str, unit: str, meaning: str) -> str:
    METRICS[name] = Metric(name=name, unit=unit, meaning=meaning, required=True)
    return name


def _sometimes(name: str, unit: str, meaning: str) -> str:
    METRICS[name] = Metric(name=name, unit=unit, meaning=meaning, required=False)
    return name


STEP = _always("step", "steps", "learner step, from 1")
TIME_S = _always("time_s", "s", "since the run began, at the end of the step")
REWARD_MEAN = _always("reward/mean", "", "mean reward of the rollouts of the step's batch, before filters")
REWARD_STD = _always("reward/std", "", "standard deviation of the same")
LOSS = _always("loss", "", "loss of the step")
GRAD_NORM = _always("grad_norm", "", "norm of the gradient, before clipping")
TOKENS_TRAINED = _always("tokens/trained", "tokens", "tokens in this step's loss")
TOKENS_GENERATED = _always("tokens/generated", "tokens", "tokens generated since the step before")
STALENESS_MAX = _always("staleness/max", "versions", "age of the oldest token of the batch, queueing included")
STALENESS_MEAN = _always("staleness/mean", "versions", "mean age of the batch's samples")
STALENESS_P90 = _always("staleness/p90", "versions", "90th percentile of the age of the batch's samples")
QUEUE_DEPTH = _always("queue/depth", "groups", "ready groups that wait to be taken")
QUEUE_CAPACITY = _always("queue/capacity", "groups", "groups that the bound on staleness lets in at once")
QUEUE_TOKENS = _always("queue/tokens", "tokens", "tokens of the groups that wait to be taken")
GROUPS_TRAINED = _always("groups/trained", "groups", "groups that ended in this step's batch")
GROUPS_FILTERED = _always("groups/filtered", "groups", "groups that a filter ended since the step before")
GROUPS_FAILED = _always("groups/failed", "groups", "groups that failed since the step before")
GROUPS_EXPIRED = _always("groups/expired", "groups", "groups dropped as too old since the step before")
LEARNER_BUSY = _always("learner/busy_fraction", "", "share of the step's time that the learner trained")
LEARNER_WAIT_DATA_S = _always("learner/wait_data_s", "s", "time that the learner waited for its batch")
POLICY_BUSY = _always("policy/busy_fraction", "", "share of the step's time that the replicas generated, mean")
WEIGHTS_PUBLISH_S = _always("weights/publish_s", "s", "time from the end of a step to its version whole in the store")
WEIGHTS_PULL_S = _always("weights/pull_s", "s", "time that the slowest replica took to fetch and check a version")
WEIGHTS_PAUSE_S = _always("weights/pause_s", "s", "longest time that a replica made no token because of a swap")
WEIGHTS_LAG_S = _always("weights/lag_s", "s", "time from the end of a step to the first token of its version")
WEIGHTS_BYTES = _always("weights/bytes", "bytes", "bytes that were put into the store for a version")
WEIGHTS_CHANGED = _sometimes(
    "weights/changed_fraction", "", "share of a version's elements whose bits changed, where it travelled as a delta"
)
WEIGHTS_PROBE_GAP = _sometimes(
    "weights/probe_gap",
    "nats",
    "how far the worst quantised replica is from the learner on a fixed text, mean of its tokens",
)
WEIGHTS_DAMAGED = _sometimes(
    "weights/damaged_deltas", "pulls", "pulls since the step before that gave up deltas for a whole version"
)
MISMATCH_KL = _always("mismatch/kl", "nats", "mean divergence of the sampler's and the learner's token probabilities")
MISMATCH_LOGPROB_MAX = _always("mismatch/logprob_diff_max", "nats", "largest difference of a token's log-probability")
MISMATCH_FRESH_KL = _sometimes(
    "mismatch/fresh_kl", "nats", "the divergence over samples that the trained version made whole, where there are any"
)
MISMATCH_FRESH_MAX = _sometimes("mismatch/fresh_logprob_diff_max", "nats", "the largest difference over the same")
CLIP_FRACTION = _always("ratio/clip_fraction", "", "share of the loss tokens whose importance ratio was clipped")
RSS_BYTES = _always("memory/rss_bytes", "bytes", "resident memory of all processes; a process each below this name")
SYNC_PEAK_BYTES = _always("memory/sync_peak_bytes", "bytes", "most extra memory of a weight sync; a process each below")

STEP_S = _sometimes("step_s", "s", "wall time of the step, end to end")
STAGE_GENERATION_S = _sometimes("stage/generation_s", "s", "time of the step in which the replicas generated")
STAGE_SCORING_S = _sometimes("stage/scoring_s", "s", "time of the step in which rewards were computed")
STAGE_TRAINING_S = _sometimes("stage/training_s", "s", "time of the step in which the learner trained")
STAGE_WEIGHTS_S = _sometimes("stage/weights_s", "s", "time of the step in which weights travelled")
REWARD_BUSY = _sometimes("reward/busy_fraction", "", "share of the step's time that the reward workers computed")
DISCARDED_TOKENS = _sometimes("policy/discarded_tokens", "tokens", "sampled tokens that swaps threw away")
RECOMPUTED_TOKENS = _sometimes("policy/recomputed_tokens", "tokens", "tokens whose KV swaps had computed again")
KV_USAGE = _sometimes("policy/kv_usage", "", "share of the fullest KV cache that is in use")
QUEUED_REQUESTS = _sometimes("policy/queued_requests", "requests", "requests that wait outside the engines")
PREEMPTIONS = _sometimes("policy/preemptions", "sequences", "sequences that lost their KV since the step before")
LIMIT_SEQUENCES = _sometimes("policy/limit_sequences", "sequences", "most sequences in an engine at once; 0: no limit")
STALENESS_BOUND = _sometimes("staleness/bound", "versions", "S, the bound that new groups are started under")
QUEUE_WAITING = _sometimes("queue/waiting", "groups", "groups that wait for a replica")
QUEUE_IN_FLIGHT = _sometimes("queue/in_flight", "groups", "groups that a replica or its rollout worker is making")
QUEUE_BYTES = _sometimes("queue/bytes", "bytes", "payload of the groups that wait to be taken")
STALENESS_IN_FLIGHT = _sometimes(
    "staleness/in_flight_mean", "versions", "the part of the mean age that came while groups were made"
)
STALENESS_IN_QUEUE = _sometimes(
    "staleness/in_queue_mean", "versions", "the part of the mean age that came while they waited to be taken"
)
ZERO_VARIANCE = _sometimes(
    "reward/zero_variance_fraction", "", "share of the batch's groups whose rewards are all equal"
)
TOKENS_BATCH = _sometimes("tokens/batch", "tokens", "tokens of the batch's samples, prompts included")
FRESH_DEPTH = _sometimes("queue/fresh_depth", "groups", "ready groups of the fresh lane (async.fresh_fraction)")
GROUPS_SALVAGED = _sometimes("groups/salvaged", "groups", "groups that went on without their cut rollouts")
ROLLOUTS_CUT = _sometimes("rollouts/cut", "rollouts", "rollouts cut off at rollout.timeout_s since the step before")
SAMPLES_OVERSIZE = _sometimes("samples/oversize", "samples", "samples above learner.max_sample_tokens, cut or refused")
UNKNOWN_KEPT_SETS = _sometimes(
    "tokens/unknown_kept_set",
    "tokens",
    "sampled tokens that are not trained on, since their kept set was too large",
)
GROUPS_CANCELLED = _sometimes("groups/cancelled", "groups", "groups cancelled since the step before")
GROUPS_REQUEUED = _sometimes(
    "groups/requeued", "groups", "groups too old or given up that wait to be made again, since the step before"
)
GROUPS_STALE = _sometimes(
    "groups/stale", "groups", "groups older than the bound in this step's batch (async.on_stale=reweight)"
)
GROUPS_LATE = _sometimes(
    "groups/late", "groups", "results dropped since the step before: their group had ended, or another try was faster"
)
EVAL_SCORE = _sometimes("eval/score", "", "mean score on the held-out prompts, greedy; an evaluation that has ended")
EVAL_LOW = _sometimes("eval/low", "", "lower end of that score's 95% interval")
EVAL_HIGH = _sometimes("eval/high", "", "upper end of the same")
EVAL_PASS_AT = _sometimes("eval/pass_at_<k>", "", "chance that one of k samples solves a held-out prompt, for each k")
EVAL_OLDEST_VERSION = _sometimes("eval/oldest_version", "versions", "oldest version that made a token of its answers")
EVAL_NEWEST_VERSION = _sometimes("eval/newest_version", "versions", "newest version that made a token of its answers")
LEARNING_RATE = _sometimes("optimizer/lr", "", "learning rate of the step")
TOKENS_COMPUTED = _sometimes(
    "tokens/computed", "tokens", "samples' tokens that the learner computed: shared prompts once, no last token"
)
USEFUL_FRACTION = _sometimes("packing/useful_fraction", "", "the same as a share of the rows, padding included")
COMPLETION_TOKENS = _sometimes("tokens/completion_mean", "tokens", "mean length of the batch's completions")
TRUNCATED_FRACTION = _sometimes("tokens/truncated_fraction", "", "share of completions cut off by the token limit")
RATIO_MEAN = _sometimes(
    "ratio/mean", "", "mean weight of a token in the loss: importance ratio times correction, before clips"
)
RATIO_MAX = _sometimes("ratio/max", "", "largest of the same")
EFFECTIVE_FRACTION = _sometimes(
    "ratio/effective_fraction", "", "effective sample size of these weights over the loss tokens"
)
MASKED_FRACTION = _sometimes("ratio/masked_fraction", "", "share of the loss tokens that the correction left out")
ENTROPY = _sometimes("policy/entropy", "nats", "mean entropy of the policy at the loss tokens")
REFERENCE_BUSY = _sometimes(
    "reference/busy_fraction", "", "share of the step's time that rollout workers waited for the reference service"
)
REFERENCE_KL = _sometimes("reference/kl", "nats", "mean divergence from the reference a token, k3")
TEACHER_KL = _sometimes("teacher/kl", "nats", "mean divergence from the teacher a token, k3")
LOSS_OBJECTIVE = _sometimes("loss/objective", "", "the objective's part of the loss, where it has several")
LOSS_KL = _sometimes("loss/kl", "", "the part of the divergence from the reference")
LOSS_ENTROPY = _sometimes("loss/entropy", "", "the part of the entropy bonus")
LOSS_TEACHER = _sometimes("loss/teacher", "", "the part of the divergence from the teacher")
LOSS_VALUE = _sometimes("loss/value", "", "the part of the value head's error")
VALUE_EXPLAINED = _sometimes(
    "value/explained_fraction", "", "share of the returns' variance that the values explained before the step"
)
EXTRA_UPDATES = _sometimes("staleness/extra_updates", "updates", "optimiser steps on the batch after its first")
ROUTER_SHARE_MAX = _sometimes(
    "router/share_max",
    "",
    "largest share of a layer's choices of experts, over the loss tokens, that one got",
)
ROUTER_ENTROPY = _sometimes(
    "router/entropy_fraction",
    "",
    "entropy of the choices of experts over that of an even use, mean of layers",
)
ZERO_ADVANTAGE = _sometimes("advantage/zero_fraction", "", "share of the batch's samples whose advantages are all 0")

CPU_S = _sometimes("cpu_s", "s", "CPU seconds of a process since it began; a process each below this name")

REQUIRED = tuple(name for name, metric in METRICS.items() if metric.required)
"""The names that every row has."""


def missing_names(row: Mapping[str, object]) -> list[str]:
    """The required names that a metrics row lacks, in the table's order."""
    return [name for name in REQUIRED if name not in row]


def check_row(row: Mapping[str, object]) -> None:
    """Raise ForgeError naming the required metrics that `row` lacks."""
    missing = missing_names(row)
    if missing:
        raise ForgeError(f"The metrics row of step {row.get(STEP, '?')} lacks {', '.join(missing)}.")


def is_known(name: str) -> bool:
    """Whether the reference has a name, or the one that it is a process's share or a k of."""
    bases = (RSS_BYTES, SYNC_PEAK_BYTES, CPU_S, EVAL_PASS_AT.removesuffix("<k>").removesuffix("_"))
    return name in METRICS or any(name.startswith(f"{base}{edge}") for base in bases for edge in "/_")


def eval_pass_at(k: int) -> str:
    """The name of pass@k."""
    return EVAL_PASS_AT.replace("<k>", str(k))


def per_process(name: str, process: str) -> str:
    """The name of one process's share of a metric, such as `memory/rss_bytes/learner_0`."""
    return f"{name}/{process}"


def markdown_table(metrics: Iterable[Metric] = tuple(METRICS.values())) -> str:
    """The reference of names as a Markdown table, for `docs/observability.md`."""
    lines = ["| name | unit | meaning | every row |", "|---|---|---|---|"]
    lines += [f"| `{m.name}` | {m.unit} | {m.meaning} | {'yes' if m.required else ''} |" for m in metrics]
    return "\n".join(lines)
