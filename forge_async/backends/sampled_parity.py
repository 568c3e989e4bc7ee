"""Do the policy, the learner and transformers compute the same? Each in a process of its own, on the same tokens.

The policy samples completions as in training; the log-probabilities that it stamped on their tokens are compared with
what the learner and transformers compute for them. vLLM and torchtitan change the process that they live in, so each
subject has one, which `compare` starts and waits for.
"""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forge_async.core.errors import ForgeError, one_sentence
from forge_async.core.versions import PolicyVersion
from forge_async.learner.settings import LearnerSettings, OptimizerSettings
from forge_async.policy.ports import GenerationRequest, Sampling
from forge_async.policy.settings import PolicySettings
from forge_async.reward.server import die_with_parent

NUM_SAMPLES = 4
"""Completions of each prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityPlan:
    """What is compared."""

    folder: Path
    """Hugging Face folder of the weights."""
    prompts: Sequence[np.ndarray]
    """int32 [T] each."""
    sampling: Sampling
    policy: PolicySettings
    learner: LearnerSettings
    """Of an engine and of a learner in one process."""
    seed: int
    timeout_s: float
    """Longest time of one subject's process, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the policy made."""

    sequences: Sequence[np.ndarray]
    """int32 [T] each: prompt and completion."""
    prompt_lengths: Sequence[int]
    """Tokens of each that are prompt."""
    logprobs: np.ndarray
    """float32: of all completions' tokens, one sequence after the other, as the policy stamped them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two subjects' log-probabilities of the same tokens."""

    first: str
    second: str
    largest: float
    """In nats; not a number when one of the two has such a value."""
    mean: float
    """Of the absolute differences."""


def compare(plan: ParityPlan) -> tuple[list[Difference], int]:
    """Compare each pair of subjects; returns their differences and the number of tokens.

    Raises ForgeError, naming the subject, when its process fails; every process has ended then.
    """
    with tempfile.TemporaryDirectory(prefix="forge-parity-") as scratch:
        sampled: Sampled = _in_a_process("policy", plan, None, Path(scratch))
        found = {"policy": sampled.logprobs}
        for subject in ("learner", "transformers"):
            found[subject] = _in_a_process(subject, plan, sampled, Path(scratch))
    return differences(found), len(sampled.logprobs)


def differences(logprobs: Mapping[str, np.ndarray]) -> list[Difference]:
    """Of each pair."""
    pairs = itertools.combinations(logprobs.items(), 2)
    return [_difference(first, second, a, b) for (first, a), (second, b) in pairs]


def _difference(first: str, second: str, a: np.ndarray, b: np.ndarray) -> Difference:
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    return Difference(first=first, second=second, largest=float(apart.max()), mean=float(apart.mean()))


def _in_a_process(subject: str, plan: ParityPlan, sampled: Sampled | None, scratch: Path) -> Any:
    plan_file, answer_file = scratch / "plan", scratch / "answer"
    plan_file.write_bytes(pickle.dumps((plan, sampled)))
    answer_file.unlink(missing_ok=True)
    command = [sys.executable, "-c", _START, subject, str(plan_file), str(answer_file), str(os.getpid())]
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_CONFIGURE_LOGGING": "0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        # It is killed when the time is over or this process is interrupted, and ends by itself when this one is gone.
        done = subprocess.run(
            command, env=quiet | os.environ, capture_output=True, text=True, timeout=plan.timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ForgeError(f"The {subject} gave no log-probabilities within {plan.timeout_s:g} s.") from error
    if done.returncode or not answer_file.exists():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise ForgeError(f"The {subject} gave no log-probabilities: {said[-1] if said else f'exit {done.returncode}'}")
    return pickle.loads(answer_file.read_bytes())


def main(argv: Sequence[str]) -> int:
    """One subject's process: its name, the file of the plan, that of the answer, the parent's pid."""
    subject, plan_file, answer_file, parent_pid = argv
    die_with_parent(int(parent_pid))
    try:
        plan, sampled = pickle.loads(Path(plan_file).read_bytes())
        answer = _SUBJECTS[subject](plan, sampled)
        Path(answer_file).write_bytes(pickle.dumps(answer))
    except Exception as error:  # noqa: BLE001 - the process's boundary: its parent reads the last line
        sys.stderr.write(f"{one_sentence(error)}\n")
        return 1
    return 0


def _sample(plan: ParityPlan, _: Sampled | None) -> Sampled:
    """The policy: sample as in training."""
    from forge_async.backends import folder_engine

    engine = folder_engine.build(plan.folder, plan.policy, PolicyVersion())
    refused = engine.add(
        GenerationRequest(
            id=str(number),
            prompt_token_ids=ids,
            num_samples=NUM_SAMPLES,
            seed=plan.seed + number * NUM_SAMPLES,
            sampling=plan.sampling,
        )
        for number, ids in enumerate(plan.prompts)
    )
    if refused:
        raise ForgeError(f"The engine refused a prompt: {next(iter(refused.values()))}")
    made = {}
    while engine.num_unfinished():
        made.update({int(result.id): result.completions for result in engine.step()})
    sequences, lengths, logprobs = [], [], []
    for number, prompt in enumerate(plan.prompts):
        edges = made[number].bounds()
        for start, stop in itertools.pairwise(edges):
            sequences.append(np.concatenate([prompt, made[number].token_ids[start:stop]]).astype(np.int32))
            lengths.append(len(prompt))
        logprobs.append(made[number].logprobs)
    return Sampled(sequences=sequences, prompt_lengths=lengths, logprobs=np.concatenate(logprobs))


def _learner_logprobs(plan: ParityPlan, sampled: Sampled | None) -> np.ndarray:
    """A learner of one rank, built as a run builds it."""
    assert sampled is not None
    from forge_async.backends.only_rank import be_the_only_rank

    be_the_only_rank()
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import supervised_loss

    learner = TitanLearner(
        plan.folder,
        loss=supervised_loss(),
        learner=plan.learner,
        optimizer=OptimizerSettings(warmup_steps=0),
        total_steps=1,
        seed=0,
        temperature=plan.sampling.temperature,
    )
    try:
        return _completions(sampled, [learner.score([ids])[0] for ids in sampled.sequences])
    finally:
        learner.close()


def _transformers_logprobs(plan: ParityPlan, sampled: Sampled | None) -> np.ndarray:
    """transformers, in float32."""
    assert sampled is not None
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(plan.folder, dtype=torch.float32, local_files_only=True).eval()
    scores = []
    with torch.no_grad():
        for sequence in sampled.sequences:
            ids = torch.from_numpy(sequence).long()
            logits = model(ids[None]).logits[0, :-1].float() / plan.sampling.temperature
            scores.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy())
    return _completions(sampled, scores)


def _completions(sampled: Sampled, scores: Sequence[np.ndarray]) -> np.ndarray:
    """The completions' part of scores [T - 1] of whole sequences."""
    return np.concatenate([score[length - 1 :] for score, length in zip(scores, sampled.prompt_lengths, strict=True)])


_SUBJECTS: dict[str, Callable[[ParityPlan, Sampled | None], Any]] = {
    "policy": _sample,
    "learner": _learner_logprobs,
    "transformers": _transformers_logprobs,
}
_START = f"import sys; from {__name__} import main; sys.exit(main(sys.argv[1:]))"
"""Not `-m`, which would pickle the answer's classes as those of another module."""
