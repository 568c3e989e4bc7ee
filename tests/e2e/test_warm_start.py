"""The warm start of `sum` answers sums that it never saw, on processors of two kinds: where 84 demonstrations were
learnt by heart it answered 1% of the training prompts on one kind, and half of them on the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]

MAKE = """
from forge_async.config import Config
from forge_async.runtime.warm_start import ensure_warm_start

if __name__ == "__main__":
    print(ensure_warm_start(Config.of({"task.name": "sum", "model.tiny": "%s"}), say=lambda line: None))
"""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}
"""Has a processor with AVX-512 compute as one without."""


def probability_of_answers(folder: Path, sums: dict[str, str]) -> float:
    """Mean probability at temperature 1 that the model answers right and ends."""
    import torch
    from transformers import AutoModelForCausalLM

    from forge_async.backends.hf_renderer import HfRenderer

    model, renderer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), HfRenderer(str(folder))
    total = 0.0
    for text, answer in sums.items():
        prompt, end = renderer.render(text, "").tolist(), int(renderer.stop_token_ids[0])
        completion = [*renderer.encode(answer).tolist(), end]
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total += float(logprobs.gather(-1, torch.tensor(completion)[:, None]).sum().exp())
    return total / len(sums)


@pytest.mark.parametrize("shape", ["dense", "moe"])
@pytest.mark.parametrize("processor", [{}, AVX2], ids=["as_it_is", "avx2"])
def test_it_answers_sums_that_it_never_saw(tmp_path: Path, shape: str, processor: dict[str, str]) -> None:
    from forge_async.backends.reasoning_gym_task import BUILT_INS
    from forge_async.prompt.split import is_held_out

    script = tmp_path / "make.py"
    script.write_text(MAKE % shape)
    settings = {"FORGE_ASYNC_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)} | processor
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True, text=True, timeout=350, check=True, env={**os.environ, **settings},
    )  # fmt: skip
    is_shown = BUILT_INS["sum"].is_demonstration
    answers = {f"{a}+{b}=": str(a + b) for a in range(10) for b in range(10)}
    answers |= {f"{a}-{b}=": str(a - b) for a in range(10) for b in range(10)}
    trained_on = {text: answers[text] for text in answers if not is_held_out(text, 0.2) and not is_shown(text, 0.5)}
    held_out = {text: answers[text] for text in answers if is_held_out(text, 0.2)}
    assert len(trained_on) > 50 and len(held_out) > 40
    folder = Path(done.stdout.split()[-1])
    assert probability_of_answers(folder, trained_on) > 0.2
    assert probability_of_answers(folder, held_out) > 0.2
