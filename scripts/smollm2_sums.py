"""The long run on a CPU: SmolLM2-135M-Instruct learns sums from nothing but a verifier's 0 or 1.

    python scripts/smollm2_sums.py [key=value ...]

Writes the prompts, trains on four fifths of them for about an hour on two cores, and evaluates on the others before, on
the way and after; docs/smollm2.md shows a run. Keys go over the settings below: `steps=100 run.resume=true` goes on.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

FOLDER = Path("runs") / "smollm2-sums"
SETTINGS = (
    "model.path=smollm2",
    "task.chat=on",
    "sampling.max_new_tokens=8",
    "sampling.temperature=0.7",
    "steps=60",
    "groups_per_step=4",
    "group_size=8",
    "async.max_staleness=1",
    "optimizer.lr=1e-5",
    "optimizer.warmup_steps=2",
    "optimizer.decay=constant",
    "learner.row_tokens=512",
    "learner.micro_batch_tokens=1024",
    "policy.max_model_tokens=128",
    "policy.max_sequences=32",
    "policy.max_batch_tokens=2048",
    "policy.kv_cache_bytes=268435456",
    "rollout.group_timeout_s=3600",
    "eval.every_steps=10",
    "checkpoint.every_steps=10",
    "run.step_timeout_s=3600",
)
SHOWN = (("2 + 5 =", "7"), ("8 + 7 =", "15"))
"""Two answers that every prompt shows, so that the model knows the form; they are asked of it nowhere."""


def score(completion: str, answer: str) -> float:
    """1 for the number and nothing else."""
    return float(completion.strip() == answer)


def prompts() -> list[dict]:
    """Every sum of two numbers from 0 to 19 that is not shown, each as a chat."""
    shown = [
        {"role": role, "content": content}
        for question, answer in SHOWN
        for role, content in (("user", question), ("assistant", answer))
    ]
    asked = {f"{a} + {b} =": str(a + b) for a, b in product(range(20), repeat=2)}
    return [
        {"messages": [*shown, {"role": "user", "content": question}], "answer": answer}
        for question, answer in asked.items()
        if question not in dict(SHOWN)
    ]


def main() -> int:
    """Write the prompts and train; the exit code is the run's."""
    from forge_async.apps import grpo

    FOLDER.mkdir(parents=True, exist_ok=True)
    data = FOLDER / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in prompts()))
    words = (f"prompts={data}", f"reward={Path(__file__)}:score", f"run.dir={FOLDER / 'run'}")
    return grpo.main([*words, *SETTINGS, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
