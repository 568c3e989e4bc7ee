"""Times steps of TRL's GRPOTrainer; run by `bench trl` with the Python of an environment that holds TRL.

    python bench_trl.py SPEC.json
    python -m torch.distributed.run --standalone --nproc-per-node N bench_trl.py SPEC.json

SPEC holds the model's folder, prompts with their token ids and answers, sizes, and the optimiser's figures; the seconds
of each step go to its `output`. TRL is given what helps it here: float32 and no gradient checkpointing (its own
defaults, bfloat16 and checkpointing, are made for GPUs and slower on CPU), the batch in one piece, no logging, saving
or evaluation. The loss is the same as ours: PPO clip by token, mean over the batch's tokens, advantages over the
group's standard deviation. Started N times by torch.distributed.run, the processes share a step's batch, as with
`accelerate launch`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

BEGUN_S = time.time()
RANK, NUM_PROCESSES = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))


def main() -> int:
    """Train for the steps of the specification and write what they took."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    check_tokens(tokenizer, spec)
    clock = train(spec, tokenizer)
    cpu_s = over_processes(clock.cpu_s)
    if RANK:
        return 0
    times_s = [end - start for start, end in zip(clock.begun_s, clock.ended_s, strict=True)]
    result = {
        "startup_s": clock.begun_s[0] - BEGUN_S,
        "step_s": times_s,
        "cpu_s": cpu_s,
        "reward_mean": clock.reward_sum / max(clock.num_rewards, 1),
        "versions": {name: metadata.version(name) for name in ("trl", "transformers", "torch", "accelerate")},
    }
    Path(spec["output"]).write_text(json.dumps(result) + "\n")
    return 0


def over_processes(cpu_s: list[float]) -> list[float]:
    """CPU seconds of each step, of all processes together."""
    if NUM_PROCESSES == 1:
        return cpu_s
    import torch.distributed as dist

    found: list[Any] = [None] * NUM_PROCESSES
    dist.all_gather_object(found, cpu_s)
    return [sum(each) for each in zip(*found, strict=True)]


def check_tokens(tokenizer: Any, spec: Mapping[str, Any]) -> None:
    """Refuse prompts that TRL would feed as other tokens than we do."""
    for text, ids in zip(spec["prompts"], spec["token_ids"], strict=True):
        if (theirs := tokenizer(text=[text])["input_ids"][0]) != ids:
            raise SystemExit(
                f"TRL makes {theirs} of the prompt {text!r}, the run {ids}: they would not do the same work."
            )


def train(spec: Mapping[str, Any], tokenizer: Any) -> Any:
    """Run the trainer; returns the clock, a callback that noted each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOTrainer

    class Clock(TrainerCallback):
        """Wall clock and CPU seconds at the bounds of each step; a step includes its generation and rewards."""

        def __init__(self) -> None:
            self.begun_s: list[float] = []
            self.ended_s: list[float] = []
            self.cpu_s: list[float] = []
            self.reward_sum, self.num_rewards = 0.0, 0
            self._cpu_begun_s = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            now_s, cpu_s = time.time(), time.process_time()
            self.cpu_s.append(cpu_s - self._cpu_begun_s)
            self.ended_s.append(now_s)
            self.next_step(now_s, cpu_s)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.next_step(time.time(), time.process_time())

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.begun_s.pop()  # of a step that will not come

        def next_step(self, now_s: float, cpu_s: float) -> None:
            self.begun_s.append(now_s)
            self._cpu_begun_s = cpu_s

    clock = Clock()

    def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        rewards = [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]
        clock.reward_sum, clock.num_rewards = clock.reward_sum + sum(rewards), clock.num_rewards + len(rewards)
        return rewards

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype="float32")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=exact,
        args=trainer_config(spec),
        train_dataset=Dataset.from_dict({"prompt": spec["prompts"], "answer": spec["answers"]}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    return clock


def trainer_config(spec: Mapping[str, Any]) -> Any:
    """TRL's settings for the same work as ours."""
    from trl import GRPOConfig

    samples, at_once = spec["groups_per_step"] * spec["group_size"], spec["micro_batch_samples"]
    return GRPOConfig(
        output_dir=spec["scratch"],
        max_steps=spec["steps"],
        seed=spec["seed"],
        # the batch: one generation and one update a step, in micro-batches that fit
        per_device_train_batch_size=at_once // NUM_PROCESSES,
        gradient_accumulation_steps=samples // at_once,
        num_generations=spec["group_size"],
        num_iterations=1,
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        shuffle_dataset=False,
        # the loss
        loss_type="dapo",
        beta=0.0,
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        scale_rewards="group",
        # the optimiser
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        adam_beta1=spec["beta1"],
        adam_beta2=spec["beta2"],
        weight_decay=spec["weight_decay"],
        max_grad_norm=spec["max_grad_norm"],
        # the machine
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        dataloader_pin_memory=False,
        # nothing beside training
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


if __name__ == "__main__":
    sys.exit(main())
