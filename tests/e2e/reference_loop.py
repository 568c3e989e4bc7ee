"""The independent loop of Law 3: synchronous GRPO with one Engine and one Learner; no pipeline, replay or store.

Run as a script: `python reference_loop.py CONFIG.yaml OUT.json`; writes the fingerprint of the weights after each step.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
from pathlib import Path


def main(config_file: str, out: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    from forge_async.config import from_file

    config = from_file(config_file)
    folder = Path(config.model.path)
    from forge_async.backends.titan_learner import TitanLearner
    from forge_async.learner.loss import objective_loss

    learner = TitanLearner(
        folder,
        loss=objective_loss(config.whole_objective(), config.asynchrony.correction, config.correction),
        learner=config.learner,
        optimizer=config.optimizer,
        total_steps=config.root.steps,
        seed=config.root.seed,
        temperature=config.sampling.temperature,
    )
    from forge_async.backends.vllm_engine import VllmEngine
    from forge_async.core.versions import PolicyVersion

    engine = VllmEngine(str(folder), config.policy, PolicyVersion(), config.root.seed)
    digests = train(config, folder, engine, learner)
    Path(out).write_text(json.dumps(digests))
    learner.close()


def train(config, folder, engine, learner) -> list[str]:
    from forge_async.backends.hf_renderer import HfRenderer
    from forge_async.backends.reasoning_gym_task import ReasoningGymSource
    from forge_async.core.records import PromptId
    from forge_async.core.rng import request_seed
    from forge_async.policy.ports import GenerationRequest, Sampling

    path, _, name = config.root.reward.rpartition(":")
    score = runpy.run_path(path)[name]
    renderer = HfRenderer(folder)
    source = ReasoningGymSource(
        config.task.name,
        renderer,
        seed=config.root.seed,
        num_prompts=config.task.num_prompts,
        demonstration_fraction=config.task.demonstration_fraction,
    )
    sampling = Sampling(
        max_new_tokens=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        stop_token_ids=renderer.stop_token_ids,
    )
    digests, num_groups = [], config.root.groups_per_step
    for step in range(config.root.steps):
        engine.load(dict(weights_of(learner)), learner.version)
        indices = range(step * num_groups, (step + 1) * num_groups)
        prompts = [source.prompt(PromptId(source=source.name, epoch=0, index=index)) for index in indices]
        engine.add(
            [
                GenerationRequest(
                    id=str(index),
                    prompt_token_ids=prompt.token_ids,
                    num_samples=config.root.group_size,
                    seed=request_seed(config.root.seed, index, 0),
                    sampling=sampling,
                )
                for index, prompt in zip(indices, prompts, strict=True)
            ]
        )
        answers = {}
        while engine.num_unfinished():
            answers.update({result.id: result.completions for result in engine.step()})
        groups = [
            group_of(index, prompt, answers[str(index)], renderer, sampling, score)
            for index, prompt in zip(indices, prompts, strict=True)
        ]
        learner.train(share_of(groups))
        digests.append(learner.digest())
    return digests


def weights_of(learner):
    for name, tensor in learner._weights.full():
        yield name, tensor.clone()


def group_of(index, prompt, completions, renderer, sampling, score):
    """GRPO's group by hand: decode, score, centre, scale."""
    import numpy as np

    from forge_async.core.records import Group
    from forge_async.rollout.samples import samples_of_turn

    rewards = []
    edges = completions.bounds()
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        row = [token for token in completions.token_ids[start:stop].tolist() if token not in sampling.stop_token_ids]
        rewards.append(score(renderer.decode(row)))
    rewards = np.array(rewards, dtype=np.float32)
    wide = rewards.astype(np.float64)
    flat = wide.max() == wide.min()
    advantages = np.zeros(len(wide)) if flat else (wide - wide.mean()) / (wide.std(ddof=1) + 1e-4)
    samples = samples_of_turn(prompt.token_ids, completions, advantages.astype(np.float32))
    return Group(index=index, prompt_id=prompt.id, samples=samples, rewards=rewards)


def share_of(groups):
    from forge_async.learner.batch import split_batch

    return split_batch(groups, 1, keep_zero_advantage=False)[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
