"""From a worker's finished groups to the replay actor, and the small records that the controller keeps of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, Protocol

from forge_async.core.records import Group
from forge_async.pipeline.make_groups import GroupMaker, LostGroup, MadeGroup
from forge_async.pipeline.ports import Admission, GroupRecord, PolicyClient


class GroupSink(Protocol):
    """Where groups go: the replay actor, from the side of a rollout worker."""

    async def generated(self, tries: Sequence[tuple[int, int]]) -> Any: ...
    async def put(self, groups: Sequence[Group]) -> Any: ...
    async def end(self, index: int, outcome: str, reason: str, attempt: int) -> Any: ...


async def make_and_hand_over(
    maker: GroupMaker, admissions: Sequence[Admission], policy: PolicyClient, replica: str, sink: GroupSink
) -> list[GroupRecord]:
    """Make groups on a replica, hand each over (or end it) as soon as it is done, and return a small record of each."""
    records: list[GroupRecord] = []
    async with aclosing(maker.make(admissions, policy, sink.generated)) as batches:
        async for batch in batches:
            for each in batch:
                if each.outcome:
                    await sink.end(each.admission.index, each.outcome, each.reason, each.admission.attempt)
            if keep := [each.group for each in batch if isinstance(each, MadeGroup) and not each.outcome]:
                await sink.put(keep)
            records += [record_of(each, replica) for each in batch]
    return records


def record_of(made: MadeGroup | LostGroup, replica: str) -> GroupRecord:
    """What the controller is told of a group."""
    index, prompt_id = made.admission.index, str(made.admission.prompt_id)
    if isinstance(made, LostGroup):
        return GroupRecord(index=index, prompt_id=prompt_id, replica=replica, outcome=made.outcome, reason=made.reason)
    # Of a few numbers each: plain Python is quicker with them than numpy.
    sampled = [step for step in set(made.group.samples.versions.steps.tolist()) if step >= 0]
    rewards = made.group.rewards.tolist()
    return GroupRecord(
        index=index,
        prompt_id=prompt_id,
        replica=replica,
        outcome=made.outcome,
        reason=made.reason,
        generated_s=made.generated_s,
        scored_s=made.scored_s,
        num_tokens=made.group.samples.num_tokens,
        completion_tokens=made.num_tokens,
        versions=(min(sampled), max(sampled)) if sampled else (0, 0),
        reward_mean=sum(rewards) / len(rewards),
        prompt=made.prompt_text,
        completion=made.completions[0],
        reward=rewards[0],
    )
