"""The ring: generate, train, publish and pull, each a loop of its own, all under one task group.

    replay --admit--> generate loop (one a replica) --make--> workers --put--> replay
    replay --take--> train loop --publish--> store --pull--> pull loop (one a replica) --pulled--> replay

The loops hold no rollouts and no weights; they say who does what next. A loop that fails ends the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from forge_async.core.versions import PolicyVersion
from forge_async.pipeline.ports import Admission, GroupRecord, Learner, LearnerStep, Pull, Replay, Replica, Workers
from forge_async.pipeline.publish import Publication, Publisher
from forge_async.pipeline.watchdog import Watchdog


class Observer(Protocol):
    """What the loops tell whoever keeps the run's records. Calls return at once."""

    def admitted(self, admissions: Sequence[Admission], replica: str) -> None: ...
    def made(self, records: Sequence[GroupRecord]) -> None: ...
    def stepped(self, step: int, ranks: Sequence[LearnerStep]) -> None: ...
    def published(self, publication: Publication) -> None: ...
    def pulled(self, replica: str, pull: Pull) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSettings:
    """The few numbers that the loops need."""

    num_steps: int
    """Steps of the whole run, those that a resumed run had done before included."""
    groups_per_step: int
    publish_every: int
    """Learner steps between publications; the last version is always published."""
    step_limit_s: float | None = None
    """Longest wait for a step, batch included, before the watchdog ends the run; None: no limit."""
    make_limit_s: float | None = None
    """The same from the admission of groups to their rewards."""
    weights_limit_s: float | None = None
    """The same for a publication, and for a pull."""


class Ring:
    """Runs the loops for a number of steps."""

    def __init__(
        self,
        *,
        replay: Replay,
        learner: Learner,
        replicas: Sequence[Replica],
        workers: Workers,
        publisher: Publisher,
        observer: Observer,
        settings: RingSettings,
        after_step: Callable[[int], Awaitable[None]] | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`after_step(number of steps done)` runs between two steps, for checkpoints and evaluations.

        The loops tell `watchdog` what they wait for; whoever made it has it look.
        """
        self._replay, self._learner, self._replicas, self._workers = replay, learner, replicas, workers
        self._publisher, self._observer, self._settings = publisher, observer, settings
        self._after_step = after_step
        self._waiting = (watchdog or Watchdog()).waiting
        self._done: int | None = None
        """The step done last, if this ring did one."""

    async def run(self, version: PolicyVersion) -> PolicyVersion:
        """Train until the last step is done and its version is published and pulled; every replica serves `version`.

        Returns the last version. Raises the first failure of any loop.
        """
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._generate(group, replica), name=f"generate {replica.name}")
                for replica in self._replicas
            ]
            pulls = [
                group.create_task(self._pull(replica, version), name=f"pull {replica.name}")
                for replica in self._replicas
            ]
            last = await self._train(group, version)
            await self._replay.close("the last step is done")
            await asyncio.gather(*pulls, *loops)
        return last

    async def noted(self) -> None:
        """See to it that the replay actor has it on record that the last step is done.

        Else it hears of that a moment later: from the learner that asks for the batch after next, or with the version.
        """
        if self._done is not None:
            await self._replay.trained(self._done)

    async def _generate(self, group: asyncio.TaskGroup, replica: Replica) -> None:
        """Keep a replica supplied with as many groups as its room allows, until the replay actor closes."""
        share = -(-self._settings.groups_per_step // len(self._replicas))
        while admissions := await self._admit(replica, share):
            self._observer.admitted(admissions, replica.name)
            group.create_task(self._make(replica, admissions), name=f"make on {replica.name}")

    async def _admit(self, replica: Replica, max_groups: int) -> Sequence[Admission]:
        with self._waiting(replica.name, "room for groups", "the learner's next batch and its own next pull"):
            return await self._replay.admit(replica.name, max_groups)

    async def _make(self, replica: Replica, admissions: Sequence[Admission]) -> None:
        what = f"groups {admissions[0].index}..{admissions[-1].index} to be generated and scored"
        with self._waiting("the ring", what, f"{replica.name} and the rollout workers", self._settings.make_limit_s):
            records = await self._workers.make(admissions, replica.name)
        self._observer.made(records)

    async def _train(self, group: asyncio.TaskGroup, version: PolicyVersion) -> PolicyVersion:
        """Step after step; each published version travels while the next step runs."""
        publication: asyncio.Task[None] | None = None
        for step in range(version.step, self._settings.num_steps):
            done = step + 1
            publishes = done % self._settings.publish_every == 0 or done == self._settings.num_steps
            ranks = await self._step(step, publishes)
            self._done = step
            self._observer.stepped(step, ranks)
            if publishes:
                if publication is not None:
                    await publication
                publication = group.create_task(self._publish(ranks[0].result.version), name="publish")
            if self._after_step is not None:
                await self._after_step(done)
        if publication is not None:
            await publication
        return PolicyVersion(policy=version.policy, incarnation=version.incarnation, step=self._settings.num_steps)

    async def _step(self, step: int, publishes: bool) -> list[LearnerStep]:
        whom, limit_s = "the replay actor and the learner's ranks", self._settings.step_limit_s
        with self._waiting("the learner", f"the batch and the update of step {step}", whom, limit_s):
            return await self._learner.step(step, publishes)

    async def _publish(self, version: PolicyVersion) -> None:
        whom, limit_s = "the learner's ranks and the store", self._settings.weights_limit_s
        with self._waiting("the ring", f"version {version.step} to be published", whom, limit_s):
            publication = await self._publisher.publish(version)
        self._observer.published(publication)

    async def _pull(self, replica: Replica, version: PolicyVersion) -> None:
        """Pull the newest version again and again; a newer one supersedes those that were not begun."""
        while version.step < self._settings.num_steps:
            with self._waiting(replica.name, f"a version newer than {version.step}", "the learner's next publication"):
                version = await self._publisher.newer_than(version)
            whom, limit_s = f"{replica.name} and the store", self._settings.weights_limit_s
            with self._waiting("the ring", f"{replica.name} to serve version {version.step}", whom, limit_s):
                pull = await self._publisher.pull(replica, version)
            version = pull.version
            self._observer.pulled(replica.name, pull)
            await self._replay.pulled(replica.name, version.step)
