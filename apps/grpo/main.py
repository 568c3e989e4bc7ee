"""Asynchronous GRPO in one file, on the public API: read it, then fork it.

    python apps/grpo/main.py --steps 20 [--model FOLDER] [policy.replicas=2 async.max_staleness=1 ...]

Two loops at once: `roll_out` has prompts answered and scored, `train` takes batches, steps, sends weights. The replay
actor gives out no prompt whose answer may be older than `async.max_staleness` when it is trained on: docs/staleness.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass

import numpy as np

from forge_async import actors
from forge_async.actors import ActorHandle, ForgeActor, KeptStore, Service, endpoint
from forge_async.apps.exit import guarded_main
from forge_async.backends.hf_renderer import HfRenderer
from forge_async.config import Config, load
from forge_async.core.records import Group, Samples
from forge_async.core.rng import request_seed
from forge_async.core.versions import PolicyVersion
from forge_async.policy.ports import GenerationRequest
from forge_async.replay.admission import Admission, Prompts
from forge_async.reward.advantages import group_advantages
from forge_async.rollout.samples import samples_of_turn
from forge_async.runtime.meshes import Placement
from forge_async.runtime.model_folder import resolve_model

DEFAULTS = ["task.name=sum", "groups_per_step=32", "group_size=8", "optimizer.lr=1e-3", "run.dir=runs/my-grpo"]
# Prompts and answers: put your own data here. The replay actor keeps the cursor and asks for them by their index.
SUMS = [(f"{a}{sign}{b}=", a + b if sign == "+" else a - b) for a in range(10) for b in range(10) for sign in "+-"]
random.Random(0).shuffle(SUMS)


class Reward(ForgeActor):
    """Scores the answers to one prompt, in a process of its own. Put your own reward here."""

    @endpoint
    def score(self, texts: list[str], correct: int) -> list[float]:
        return [float(text == str(correct)) for text in texts]


@dataclass(frozen=True, slots=True)
class Grpo:
    """The actors and the two loops."""

    config: Config
    renderer: HfRenderer  # text to token ids and back
    store: KeptStore  # where versions of the weights lie; one that dies is replaced
    learner: ActorHandle  # one actor on a mesh of ranks: `.call` reaches all of them
    policy: Service  # replicas of one actor: `.route` reaches a healthy one, `.fanout` all
    reward: Service
    replay: ActorHandle  # one actor in one process: `.call_one`

    @classmethod
    async def start(cls, config: Config, hosts: Placement) -> Grpo:
        """Start all actors, each in processes of its own."""
        model, root, dials, lora = str(resolve_model(config)), config.root, config.asynchrony, config.travelling_lora()
        plan, prompts = actors.LearnerPlan.of(config, model), Prompts(source="sums", epoch_size=len(SUMS))
        store = await actors.KeptStore.start(config.weights, hosts.controller)
        learner = actors.LearnerActor.options(hosts=hosts.learner, procs=config.learner.ranks, spmd=True)
        policy = actors.PolicyActor.options(mesh_name="policy", hosts=hosts.policy, num_replicas=config.policy.replicas)
        replay = actors.ReplayActor.options(hosts=hosts.controller)
        started = await asyncio.gather(
            learner.as_actor(plan, store.handle),
            policy.as_service("policy", model, config.policy, config.weights, store=store.handle, lora=lora),
            Reward.options(hosts=hosts.controller).as_service(),
            replay.as_actor(dials, groups_per_step=root.groups_per_step, num_steps=root.steps, prompts=prompts),
        )
        await started[3].add_replica.call_one("policy", 0)  # the service counts as one, at its oldest replica's version
        return cls(config, HfRenderer(model), store.serve(started[0], started[1]), *started)

    async def roll_out(self) -> None:
        """Ask for as many prompts as the bound has room for, again and again, until the replay actor is closed."""
        async with asyncio.TaskGroup() as tasks:
            while admissions := await self.replay.admit.call_one("policy", self.config.root.groups_per_step):
                for admission in admissions:
                    tasks.create_task(self.make_group(admission))

    async def make_group(self, admission: Admission) -> None:
        """Prompt -> answers -> rewards -> advantages -> replay."""
        (text, correct), index = SUMS[admission.prompt_id.index], admission.index
        prompt, seed = self.renderer.render(text), request_seed(self.config.root.seed, index, turn=0)
        how, num = self.config.sampling.until(self.renderer.stop_token_ids), self.config.root.group_size
        request = GenerationRequest(id=str(index), prompt_token_ids=prompt, num_samples=num, seed=seed, sampling=how)
        [result] = await self.policy.generate.route([request], min_step=admission.min_step, timeout_s=300)
        texts = [self.renderer.decode(answer) for answer in result.completions.rows()]
        rewards = np.array(await self.reward.score.route(texts, correct))
        samples = samples_of_turn(prompt, result.completions, group_advantages(rewards))
        group = Group(index=index, prompt_id=admission.prompt_id, samples=samples, rewards=rewards)
        await self.replay.put.call_one([group])

    async def train(self, tasks: asyncio.TaskGroup) -> None:
        """Take a batch and step; the new weights travel while the next step runs."""
        sending = None
        for step in range(self.config.root.steps):
            batch: list[Group] = await self.replay.take.call_one(step)
            samples = Samples.concat([group.samples for group in batch])
            await self.learner.train.call(samples, timeout_s=300)
            await self.replay.trained.call_one(step)
            report(step, batch, samples)
            if sending:
                await sending
            version, *_ = await self.learner.snapshot.call()
            sending = tasks.create_task(self.send_weights(version))

    async def send_weights(self, version: PolicyVersion) -> None:
        """Publish a snapshot; every replica swaps to it between two engine steps, whatever it is answering."""
        await self.store.publish(version)
        await self.replay.published.call_one(version.step)
        await self.store.pull(version)
        await self.replay.pulled.call_one("policy", version.step)  # only now there is room for more


def report(step: int, batch: list[Group], samples: Samples) -> None:
    """A line a step. Each token carries the version that made it; a group is as old as its oldest token."""
    reward, staleness = np.mean([group.rewards for group in batch]), max(step - group.oldest_step() for group in batch)
    versions, counts = np.unique(samples.versions.per_token_steps()[samples.loss_mask], return_counts=True)
    tokens = dict(zip(versions.tolist(), counts.tolist(), strict=True))
    print(f"step {step + 1:3}  reward {reward:.3f}  staleness {staleness}  tokens by version {tokens}", flush=True)


async def run(config: Config) -> int:
    async with await Placement.start(config.job, config.run.dir) as hosts:  # ends all processes, whatever happens
        grpo = await Grpo.start(config, hosts)
        await grpo.send_weights((await grpo.learner.snapshot.call())[0])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(grpo.roll_out())
            await grpo.train(tasks)
            await grpo.replay.close.call_one("the last step is done")
        await grpo.learner.save.call(f"{config.run.dir}/model")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="Hugging Face folder or name; empty: the tiny warm start")
    parser.add_argument("--steps", default="20", help="learner steps")
    parser.add_argument("words", nargs="*", metavar="key=value", help="see python -m forge_async.apps.grpo --help")
    args = parser.parse_intermixed_args()
    config, _ = load([*DEFAULTS, f"model.path={args.model}", f"steps={args.steps}", *args.words])
    return asyncio.run(run(config))


if __name__ == "__main__":
    raise SystemExit(guarded_main(main))
